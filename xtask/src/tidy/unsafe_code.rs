//! Unsafe code stays where it is reviewed: the launch of kernels, the SIMD intrinsics, and one call of
//! a foreign matrix product, which only takes pointers, in the demo.
//!
//! The lint `unsafe_code` is denied everywhere and opened by an attribute, which any file could
//! carry; this list says which files may.

use crate::tidy::{Problem, code};

/// Files, or folders that end in `/`, that may hold unsafe code.
const ALLOWED: [&str; 5] = [
    "crates/attn-kernels/src/compile.rs",
    "crates/attn-kernels/src/module.rs",
    "crates/attn-kernels/src/launch.rs",
    "crates/attn-kernels/src/cpu/simd/",
    "benches/src/model/matmul.rs",
];

/// The word `unsafe` in the code of a file outside the list.
pub(super) fn check(path: &str, code: &str) -> Vec<Problem> {
    if ALLOWED.iter().any(|a| path == *a || (a.ends_with('/') && path.starts_with(a))) {
        return Vec::new();
    }
    code::words(code, "unsafe")
        .map(|(line, _)| Problem::new(path, line, format!("unsafe code outside {ALLOWED:?}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_code_is_refused_outside_the_list() {
        for path in [
            "crates/attn-core/src/view.rs",
            "crates/attn-kernels/src/cpu/simd.rs",
            "crates/attn-kernels/src/launch_more.rs",
            "crates/attn-kernels/tests/all/main.rs",
            "benches/src/main.rs",
        ] {
            let found = check(path, "a\nb = unsafe { c }\n");
            assert_eq!(found.iter().map(|p| p.line).collect::<Vec<_>>(), [2], "{path}");
        }
    }

    #[test]
    fn unsafe_code_passes_in_the_list_and_as_part_of_a_name() {
        assert_eq!(check("crates/attn-kernels/src/cpu/simd/avx2.rs", "unsafe fn f() {}"), []);
        assert_eq!(check("crates/attn-kernels/src/launch.rs", "unsafe fn f() {}"), []);
        assert_eq!(check("benches/src/model/matmul.rs", "unsafe { f() }"), []);
        assert_eq!(check("crates/attn-core/src/lib.rs", "#![forbid(unsafe_code)]"), []);
    }
}
