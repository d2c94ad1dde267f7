#![doc = include_str!("../../README.md")]
#![expect(clippy::doc_markdown, reason = "a README names formats and files as prose does")]
