//! Manifests: every member inherits lints and versions, and what can be published can be published.
//!
//! Cargo's metadata has inherited values already filled in, so inheritance is read from the text.

use crate::tidy::Problem;
use crate::tidy::metadata::{FIELDS, Metadata, Package};
use crate::tidy::tree::Tree;

/// Files that a licence asks to travel with the code.
const LICENCES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];
/// The most keywords that the registry takes.
const MAX_KEYWORDS: usize = 5;

/// Every rule on manifests.
pub(super) fn check(metadata: &Metadata, tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (package, manifest) in metadata.members() {
        let text = tree.text(manifest).unwrap_or_default();
        problems.extend(inherits_lints(manifest, text));
        problems.extend(inherits_versions(manifest, text));
        if package.publishable {
            problems.extend(publishable(manifest, package));
            problems.extend(licences(manifest, tree));
        }
    }
    problems
}

/// The lints table is the workspace's.
fn inherits_lints(manifest: &str, text: &str) -> Vec<Problem> {
    let inherits = entries(text).any(|(section, _, entry)| {
        let entry: String = entry.split_whitespace().collect();
        (section == "lints" && entry == "workspace=true") || entry == "lints.workspace=true"
    });
    if inherits {
        return Vec::new();
    }
    vec![Problem::new(manifest, 1, "lints are not inherited: `[lints]` with `workspace = true`")]
}

/// A dependency has its version in the workspace manifest, with the reason for it, or is a path.
fn inherits_versions(manifest: &str, text: &str) -> Vec<Problem> {
    let own = entries(text).filter(|(section, _, entry)| {
        let (key, value) = entry.split_once('=').unwrap_or((entry, ""));
        let (key, value) = (key.trim(), value.trim());
        if section.ends_with("dependencies") {
            // `x = "1"`, `x = { version = "1" }` and `x.version = "1"`.
            value.starts_with('"') || value.contains("version") || key.ends_with(".version")
        } else {
            // `[dependencies.x]`, with the version on a line of its own.
            section.contains("dependencies.") && key == "version"
        }
    });
    own.map(|(_, line, _)| Problem::new(manifest, line, "version outside workspace.dependencies"))
        .collect()
}

/// What the registry asks for is there.
fn publishable(manifest: &str, package: &Package) -> Vec<Problem> {
    let absent = FIELDS.into_iter().filter(|field| !package.fields.contains_key(field));
    let mut problems: Vec<_> = absent
        .map(|field| Problem::new(manifest, 1, format!("`{field}` is missing, for publishing")))
        .collect();
    if !(1..=MAX_KEYWORDS).contains(&package.keywords) {
        let got = package.keywords;
        let message = format!("`keywords`: expected 1 to {MAX_KEYWORDS}, got {got}");
        problems.push(Problem::new(manifest, 1, message));
    }
    if package.build_script {
        problems.push(Problem::new(manifest, 1, "a build script: a product crate has none"));
    }
    problems
}

/// The licence texts lie beside the manifest, so that `cargo package` carries them, and are those of
/// the workspace.
fn licences(manifest: &str, tree: &Tree) -> Vec<Problem> {
    let folder = manifest.strip_suffix("Cargo.toml").unwrap_or_default();
    let stray = LICENCES.into_iter().filter(|name| {
        let copy = tree.text(&format!("{folder}{name}"));
        copy.is_none() || copy != tree.text(name)
    });
    stray
        .map(|name| Problem::new(manifest, 1, format!("{folder}{name} is not a copy of {name}")))
        .collect()
}

/// The entries of a manifest: (section, line, entry). Comments are left out.
fn entries(text: &str) -> impl Iterator<Item = (&str, usize, &str)> {
    let mut section = "";
    text.lines().zip(1..).filter_map(move |(line, number)| {
        let line = line.split('#').next().unwrap_or_default().trim();
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            section = name;
            return None;
        }
        (!line.is_empty()).then_some((section, number, line))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn lines(problems: &[Problem]) -> Vec<usize> {
        problems.iter().map(|p| p.line).collect()
    }

    fn complete() -> Package {
        Package {
            name: "attn-core".to_owned(),
            manifest: Some("c/Cargo.toml".to_owned()),
            publishable: true,
            fields: FIELDS.into_iter().map(|f| (f, "x".to_owned())).collect(),
            keywords: 3,
            ..Package::default()
        }
    }

    #[test]
    fn manifest_passes_both_ways_to_inherit_lints() {
        for text in
            ["[lints]\nworkspace = true\n", "[package]\nname = \"x\"\nlints.workspace=true\n"]
        {
            assert_eq!(inherits_lints("m", text), []);
        }
    }

    #[test]
    fn manifest_refuses_own_lints() {
        for text in ["", "[lints.rust]\nunsafe_code = \"allow\"\n", "[package]\nworkspace = true\n"]
        {
            assert_eq!(inherits_lints("m", text).len(), 1, "{text}");
        }
    }

    #[test]
    fn manifest_refuses_own_versions() {
        let text = "[package]\nversion = \"1\"\n[dependencies]\na.workspace = true\nb = \"1\"\n\
                    c = { path = \"../c\" }\n[dev-dependencies]\nd = { version = \"1\" } # why\n\
                    [target.'cfg(unix)'.dependencies]\ne.version = \"1\"\n\
                    [dependencies.f]\npath = \"../f\"\nversion = \"1\"\n";
        assert_eq!(lines(&inherits_versions("m", text)), [5, 8, 10, 13]);
    }

    #[test]
    fn manifest_refuses_each_missing_field() {
        assert_eq!(publishable("m", &complete()), []);
        for field in FIELDS {
            let mut package = complete();
            package.fields.remove(field);
            let found = publishable("m", &package);
            assert!(found.len() == 1 && found[0].message.contains(field), "{found:?}");
        }
    }

    #[test]
    fn manifest_refuses_keywords_out_of_range_and_build_scripts() {
        for keywords in [0, MAX_KEYWORDS + 1] {
            assert_eq!(publishable("m", &Package { keywords, ..complete() }).len(), 1);
        }
        assert_eq!(publishable("m", &Package { build_script: true, ..complete() }).len(), 1);
    }

    #[test]
    fn manifest_refuses_licences_that_are_absent_or_differ() {
        let tree =
            Tree::of([("LICENSE-MIT", "a"), ("LICENSE-APACHE", "b"), ("c/LICENSE-MIT", "x")]);
        assert_eq!(licences("c/Cargo.toml", &tree).len(), 2);
        let tree = Tree::of([
            ("LICENSE-MIT", "a"),
            ("LICENSE-APACHE", "b"),
            ("c/LICENSE-MIT", "a"),
            ("c/LICENSE-APACHE", "b"),
        ]);
        assert_eq!(licences("c/Cargo.toml", &tree), []);
    }

    #[test]
    fn check_applies_every_rule_to_a_member() {
        let package = Package { keywords: 0, ..complete() };
        let metadata = Metadata { packages: BTreeMap::from([("id".to_owned(), package)]) };
        let tree = Tree::of([("c/Cargo.toml", "[dependencies]\na = \"1\"\n")]);
        // Lints, version, keywords, two licences.
        assert_eq!(check(&metadata, &tree).len(), 5);
    }
}
