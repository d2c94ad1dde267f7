//! Who may depend on whom: a star around `attn-core`, and CUDA behind one door.
//!
//! `cargo add attn-paged` must bring no CUDA in, and a crate of the star must be usable without its
//! neighbours. A manifest alone cannot promise that, since the arrow may run through a third crate.

use std::collections::{BTreeMap, VecDeque};

use crate::tidy::Problem;
use crate::tidy::metadata::{Metadata, Package};
use crate::tidy::tree::Tree;

/// The centre.
const CORE: &str = "attn-core";
/// The members that may depend on the centre and on no other member.
const STAR: [&str; 4] = ["attn-reference", "attn-paged", "attn-select", "attn-kernels"];
/// The members that compose the others; nobody depends on them.
const LEAVES: [&str; 2] = ["attn-bench", "attn-candle"];
/// The tasks, which must build when no product crate does.
const TASKS: &str = "xtask";
/// The crate that reaches CUDA.
const CUDA: &str = "cudarc";
/// The members that may name it.
const CUDA_USERS: [&str; 3] = ["attn-kernels", "attn-bench", "attn-candle"];
/// The members that may not reach it in any number of steps.
const CUDA_FREE: [&str; 4] = ["attn-core", "attn-reference", "attn-paged", "attn-select"];
/// The member that tests of every other may use.
const ORACLE: &str = "attn-reference";

/// Every rule on dependencies.
pub(super) fn check(metadata: &Metadata, tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (package, manifest) in metadata.members() {
        let text = tree.text(manifest).unwrap_or_default();
        let found = [
            placed(package),
            star(package, metadata),
            tests(package, metadata),
            names_cuda(package),
            reaches_cuda(package, metadata),
        ];
        problems.extend(found.into_iter().flatten().map(|broken| {
            Problem::new(manifest, line_of(text, &broken.dependency), broken.message)
        }));
    }
    problems
}

/// A broken rule and the dependency whose line in the manifest breaks it.
#[derive(Debug, PartialEq)]
struct Broken {
    dependency: String,
    message: String,
}

fn broken(dependency: &str, message: String) -> Broken {
    Broken { dependency: dependency.to_owned(), message }
}

/// Every member has its place here, so that a new one cannot go unchecked.
fn placed(package: &Package) -> Vec<Broken> {
    let name = package.name.as_str();
    if name == CORE || name == TASKS || STAR.contains(&name) || LEAVES.contains(&name) {
        return Vec::new();
    }
    vec![broken("name", format!("{name} has no place among the arrows of tidy"))]
}

/// Normal and build dependencies between members follow the star.
fn star(package: &Package, metadata: &Metadata) -> Vec<Broken> {
    let name = package.name.as_str();
    let between_members = members_of(package, metadata, false);
    let refused = between_members.filter(|to| match name {
        CORE | TASKS => true,
        _ if STAR.contains(&name) => *to != CORE,
        _ => LEAVES.contains(to),
    });
    refused.map(|to| broken(to, format!("{name} may not depend on {to}"))).collect()
}

/// Dev-dependencies between members: the reference, by path alone. With a version `cargo package`
/// would keep the line, and a crate could not be published before the crates that test it.
fn tests(package: &Package, metadata: &Metadata) -> Vec<Broken> {
    let name = package.name.as_str();
    if LEAVES.contains(&name) {
        return Vec::new();
    }
    let mut found: Vec<_> = members_of(package, metadata, true)
        .filter(|to| name == TASKS || *to != ORACLE)
        .map(|to| broken(to, format!("tests of {name} may not depend on {to}")))
        .collect();
    let versioned = package.declared.iter().filter(|d| d.dev && d.name == ORACLE);
    found.extend(versioned.filter(|d| d.requirement != "*").map(|d| {
        let got = &d.requirement;
        broken(ORACLE, format!("dev-dependency on {ORACLE}: expected a path alone, got {got}"))
    }));
    found
}

/// Only the users of CUDA name its crate, even as an optional or a dev-dependency.
fn names_cuda(package: &Package) -> Vec<Broken> {
    let named = package.declared.iter().any(|d| d.name == CUDA);
    if !named || CUDA_USERS.contains(&package.name.as_str()) {
        return Vec::new();
    }
    vec![broken(CUDA, format!("{} may not name {CUDA}", package.name))]
}

/// No chain of normal dependencies leads from a CUDA-free member to CUDA.
fn reaches_cuda(package: &Package, metadata: &Metadata) -> Vec<Broken> {
    if !CUDA_FREE.contains(&package.name.as_str()) {
        return Vec::new();
    }
    let Some(chain) = chain_to_cuda(package, metadata) else { return Vec::new() };
    let message = format!("{} reaches {CUDA}: {}", package.name, chain.join(" -> "));
    vec![broken(chain.first().copied().unwrap_or(CUDA), message)]
}

/// The names on a shortest chain from a dependency of `package` to CUDA, both ends included.
fn chain_to_cuda<'a>(package: &'a Package, metadata: &'a Metadata) -> Option<Vec<&'a str>> {
    // Each id reached, with the id that it was reached from.
    let mut from: BTreeMap<&str, Option<&str>> = BTreeMap::new();
    let mut queue: VecDeque<(&str, Option<&str>)> =
        package.normal.iter().map(|id| (id.as_str(), None)).collect();
    while let Some((id, parent)) = queue.pop_front() {
        let Some(reached) = metadata.packages.get(id) else { continue };
        if from.contains_key(id) {
            continue;
        }
        from.insert(id, parent);
        if reached.name == CUDA {
            let steps = std::iter::successors(Some(id), |step| from.get(step).copied().flatten());
            let mut chain: Vec<_> = steps.map(|s| metadata.packages[s].name.as_str()).collect();
            chain.reverse();
            return Some(chain);
        }
        queue.extend(reached.normal.iter().map(|next| (next.as_str(), Some(id))));
    }
    None
}

/// The members that `package` declares, among its dev-dependencies or among the others.
fn members_of<'a>(
    package: &'a Package,
    metadata: &'a Metadata,
    dev: bool,
) -> impl Iterator<Item = &'a str> {
    let declared = package.declared.iter().filter(move |d| d.dev == dev);
    declared
        .map(|d| d.name.as_str())
        .filter(|name| metadata.members().any(|(m, _)| m.name == *name))
}

/// The line of a manifest that begins with `key`, else the first.
fn line_of(manifest: &str, key: &str) -> usize {
    let is_key = |line: &str| {
        let rest = line.trim_start().strip_prefix(key);
        rest.is_some_and(|r| r.starts_with(['.', ' ', '=']))
    };
    manifest.lines().position(is_key).map_or(1, |at| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::metadata::Declared;

    /// A workspace where each member has its normal dependencies, in cargo's two forms.
    fn workspace(members: &[(&str, &[&str])], others: &[(&str, &[&str])]) -> Metadata {
        let mut packages = BTreeMap::new();
        for (is_member, list) in [(true, members), (false, others)] {
            for (name, dependencies) in list {
                let declared = dependencies.iter().map(|d| normal(d)).collect();
                let package = Package {
                    name: (*name).to_owned(),
                    manifest: is_member.then(|| format!("crates/{name}/Cargo.toml")),
                    declared,
                    normal: dependencies.iter().map(|d| (*d).to_owned()).collect(),
                    ..Package::default()
                };
                packages.insert((*name).to_owned(), package);
            }
        }
        Metadata { packages }
    }

    fn normal(name: &str) -> Declared {
        Declared { name: name.to_owned(), dev: false, requirement: "^1".to_owned() }
    }

    fn dev(name: &str, requirement: &str) -> Declared {
        Declared { name: name.to_owned(), dev: true, requirement: requirement.to_owned() }
    }

    fn messages(metadata: &Metadata) -> Vec<String> {
        check(metadata, &Tree::of([])).into_iter().map(|p| p.message).collect()
    }

    fn sound() -> Metadata {
        workspace(
            &[
                ("attn-core", &["half"]),
                ("attn-paged", &["attn-core"]),
                ("attn-reference", &["attn-core"]),
                ("attn-kernels", &["attn-core", "cudarc"]),
                ("attn-bench", &["attn-core", "attn-paged", "attn-kernels", "cudarc"]),
                ("xtask", &["clap"]),
            ],
            &[("half", &[]), ("cudarc", &["half"]), ("clap", &[])],
        )
    }

    #[test]
    fn arrows_pass_the_star() {
        assert_eq!(messages(&sound()), Vec::<String>::new());
    }

    #[test]
    fn arrows_refuse_a_member_without_a_place() {
        let found = messages(&workspace(&[("attn-extra", &[])], &[]));
        assert_eq!(found, ["attn-extra has no place among the arrows of tidy"]);
    }

    #[test]
    fn arrows_refuse_one_room_in_another() {
        for (from, to) in [
            ("attn-paged", "attn-kernels"),
            ("attn-core", "attn-reference"),
            ("xtask", "attn-core"),
            ("attn-candle", "attn-bench"),
        ] {
            let found = messages(&workspace(&[(from, &[to]), (to, &[])], &[]));
            assert_eq!(found, [format!("{from} may not depend on {to}")]);
        }
    }

    #[test]
    fn arrows_refuse_cuda_by_name_even_in_tests() {
        let mut metadata = sound();
        let paged = metadata.packages.get_mut("attn-paged").unwrap();
        paged.declared.push(dev("cudarc", "^0.1"));
        assert_eq!(messages(&metadata), ["attn-paged may not name cudarc"]);
    }

    #[test]
    fn arrows_refuse_cuda_three_steps_away() {
        let metadata = workspace(
            &[("attn-select", &["a"])],
            &[("a", &["b"]), ("b", &["a", "cudarc"]), ("cudarc", &[])],
        );
        assert_eq!(messages(&metadata), ["attn-select reaches cudarc: a -> b -> cudarc"]);
    }

    #[test]
    fn arrows_pass_dev_dependencies_on_the_reference_by_path() {
        let mut metadata = sound();
        let paged = metadata.packages.get_mut("attn-paged").unwrap();
        paged.declared.push(dev("attn-reference", "*"));
        assert_eq!(messages(&metadata), Vec::<String>::new());
    }

    #[test]
    fn arrows_refuse_other_dev_dependencies_on_members() {
        for (declared, words) in [
            (dev("attn-reference", "^0.1.0"), "expected a path alone, got ^0.1.0"),
            (dev("attn-kernels", "*"), "tests of attn-paged may not depend on attn-kernels"),
        ] {
            let mut metadata = sound();
            metadata.packages.get_mut("attn-paged").unwrap().declared.push(declared);
            let found = messages(&metadata);
            assert!(found.len() == 1 && found[0].contains(words), "{found:?}");
        }
    }

    #[test]
    fn arrows_point_at_the_line_of_the_dependency() {
        let metadata = workspace(&[("attn-core", &["attn-paged"]), ("attn-paged", &[])], &[]);
        let manifest =
            "[package]\nname = \"attn-core\"\n[dependencies]\nattn-paged.workspace = true\n";
        let tree = Tree::of([("crates/attn-core/Cargo.toml", manifest)]);
        assert_eq!(check(&metadata, &tree)[0].line, 4);
    }
}
