//! Rust source with comments, strings and characters blanked out, line for line.
//!
//! Rules on tokens look here, so that a word in a message or a comment is not taken for code. A full
//! parser would be one more dependency to build on every fresh clone, for rules that need a token.

/// The code of `source`: the same lines, where every character that belongs to a comment or to the
/// inside of a string or character literal is a space.
pub(super) fn only(source: &str) -> String {
    let mut scan = Scan { rest: source, out: String::with_capacity(source.len()) };
    let mut word_before = false;
    while let Some(first) = scan.rest.chars().next() {
        let rest = scan.rest;
        if rest.starts_with("//") {
            scan.blank(rest.find('\n').unwrap_or(rest.len()));
        } else if rest.starts_with("/*") {
            scan.blank(block_comment(rest));
        } else if first == '"' {
            scan.blank(quoted(rest, '"'));
        } else if first == '\'' && is_char_literal(rest) {
            scan.blank(quoted(rest, '\''));
        } else if let Some(length) = raw_string(rest)
            && !word_before
        {
            scan.blank(length);
        } else {
            scan.keep(first);
        }
        // `br"..."` and `cr"..."`: the prefix letter does not make the `r` the end of a name.
        let prefix = matches!(first, 'b' | 'c') && !word_before;
        word_before = (first.is_alphanumeric() || first == '_') && !prefix;
    }
    scan.out
}

/// The places of `word` in `code` as a whole word: (line from 1, rest of the line after it).
pub(super) fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = (usize, &'a str)> {
    code.lines().zip(1..).flat_map(move |(line, number)| {
        line.match_indices(word).filter_map(move |(at, _)| {
            let (before, after) = (&line[..at], &line[at + word.len()..]);
            let whole = !before.ends_with(is_word) && !after.starts_with(is_word);
            whole.then_some((number, after))
        })
    })
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

struct Scan<'a> {
    rest: &'a str,
    out: String,
}

impl Scan<'_> {
    fn keep(&mut self, c: char) {
        self.out.push(c);
        self.rest = &self.rest[c.len_utf8()..];
    }

    fn blank(&mut self, length: usize) {
        let (gone, rest) = self.rest.split_at(length);
        self.out.extend(gone.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        self.rest = rest;
    }
}

/// Bytes of the block comment that `rest` begins with; block comments nest.
fn block_comment(rest: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < rest.len() {
        let tail = &rest.as_bytes()[at..];
        if tail.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if tail.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// Bytes of the literal that `rest` begins with, up to the closing `quote`.
fn quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    rest.len()
}

/// `'x'` and `'\n'` are literals, `'a` in `&'a str` is a lifetime.
fn is_char_literal(rest: &str) -> bool {
    let mut chars = rest.chars().skip(1);
    match (chars.next(), chars.next()) {
        (Some('\\'), _) => true,
        (Some(_), Some(end)) => end == '\'',
        _ => false,
    }
}

/// Bytes of the raw string that `rest` begins with, if it begins with one.
fn raw_string(rest: &str) -> Option<usize> {
    let after_r = rest.strip_prefix('r')?;
    let hashes = after_r.len() - after_r.trim_start_matches('#').len();
    let body = after_r[hashes..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    let opening = rest.len() - body.len();
    Some(body.find(&close).map_or(rest.len(), |at| opening + at + close.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blanks_comments_and_keeps_lines() {
        let code = only("a // x\nb /* y /* z */\n w */ c");
        assert_eq!(code, "a     \nb             \n      c");
    }

    #[test]
    fn only_blanks_strings_of_every_kind() {
        for source in [
            r#"f("x", 1)"#,
            r#"f("x\"x", 1)"#,
            r##"f(r#"x " x"#, 1)"##,
            r#"f(b"x", 1)"#,
            r##"f(br#"x"#, 1)"##,
            "f('x', 1)",
            r"f('\'', 1)",
            "f(\"x\n\", 1)",
        ] {
            let code = only(source);
            assert!(!code.contains('x') && code.ends_with(", 1)"), "{source} -> {code}");
            assert_eq!(code.lines().count(), source.lines().count(), "{source}");
        }
    }

    #[test]
    fn only_keeps_lifetimes_and_raw_names() {
        for source in ["fn f<'a>(x: &'a str) -> &'a str", "r#type + r#mod", "var\"", "for_r"] {
            let code = only(source);
            assert_eq!(code.trim_end_matches([' ', '"']), source.trim_end_matches('"'), "{source}");
        }
    }

    #[test]
    fn only_ends_on_an_unclosed_literal() {
        for source in ["\"abc", "/* abc", "r#\"abc", "'\\"] {
            assert_eq!(only(source).trim(), "", "{source}");
        }
    }

    #[test]
    fn words_match_whole_words_only() {
        let found: Vec<_> = words("unsafe_code\nx = unsafe { 1 }", "unsafe").collect();
        assert_eq!(found, [(2, " { 1 }")]);
    }
}
