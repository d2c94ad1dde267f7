//! What `cargo metadata` says about the workspace, reduced to what the rules ask.
//!
//! The graph is cargo's resolved one, as in `cargo tree -e normal`, not the manifests' text: a
//! forbidden crate can come in three steps away. It is resolved for this machine's platform, since
//! the full graph would download crates of every other platform.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::error::Error;
use crate::process;

/// The packages of the resolved graph, by package id.
#[derive(Debug, Default)]
pub(super) struct Metadata {
    /// Every package: members and their dependencies.
    pub(super) packages: BTreeMap<String, Package>,
}

/// A package.
#[derive(Debug, Default)]
pub(super) struct Package {
    /// Its name.
    pub(super) name: String,
    /// Its manifest, relative to the workspace folder; `None` for a package that is no member.
    pub(super) manifest: Option<String>,
    /// Whether `cargo publish` accepts it.
    pub(super) publishable: bool,
    /// Whether it has a build script.
    pub(super) build_script: bool,
    /// The fields of its manifest that hold text: `license`, `readme` and so on, when present.
    pub(super) fields: BTreeMap<&'static str, String>,
    /// Number of its keywords.
    pub(super) keywords: usize,
    /// Dependencies that its manifest declares, on any platform, optional ones included.
    pub(super) declared: Vec<Declared>,
    /// Ids of the packages that its normal dependencies resolve to.
    pub(super) normal: Vec<String>,
}

/// A dependency as a manifest declares it.
#[derive(Debug)]
pub(super) struct Declared {
    /// The package that it names.
    pub(super) name: String,
    /// True for a dev-dependency, false for a normal or a build dependency.
    pub(super) dev: bool,
    /// The version requirement; `*` where there is none.
    pub(super) requirement: String,
}

/// The text fields that the rules ask for.
pub(super) const FIELDS: [&str; 4] = ["license", "rust_version", "description", "readme"];

impl Metadata {
    /// Asks cargo.
    ///
    /// # Errors
    /// Cargo could not be started, failed, or printed something else than its documentation says.
    pub(super) fn read() -> Result<Self, Error> {
        let mut command = process::cargo();
        let version = process::output(process::cargo().arg("-vV"))?;
        command.args(["metadata", "--format-version", "1"]);
        let version = String::from_utf8_lossy(&version);
        if let Some(host) = version.lines().find_map(|l| l.strip_prefix("host: ")) {
            command.args(["--filter-platform", host]);
        }
        let json = process::output(&mut command)?;
        let bad = |got: &str| Error::Output {
            command: process::line(&command),
            expected: "JSON with packages, workspace_members and resolve.nodes",
            got: got.to_owned(),
        };
        let json = serde_json::from_slice(&json).map_err(|e| bad(&e.to_string()))?;
        Self::parse(&json).ok_or_else(|| bad("JSON without one of them"))
    }

    /// The members of the workspace.
    pub(super) fn members(&self) -> impl Iterator<Item = (&Package, &str)> {
        self.packages.values().filter_map(|p| p.manifest.as_deref().map(|m| (p, m)))
    }

    fn parse(json: &Value) -> Option<Self> {
        let root = Path::new(json["workspace_root"].as_str()?);
        let members = json["workspace_members"].as_array()?;
        let mut packages = BTreeMap::new();
        for package in json["packages"].as_array()? {
            let id = package["id"].as_str()?;
            let mut parsed = parse_package(package)?;
            if members.iter().any(|m| m == id) {
                let manifest = Path::new(package["manifest_path"].as_str()?);
                let manifest = manifest.strip_prefix(root).ok()?;
                parsed.manifest = Some(manifest.to_str()?.replace('\\', "/"));
            }
            packages.insert(id.to_owned(), parsed);
        }
        for node in json["resolve"]["nodes"].as_array()? {
            let normal = node["deps"].as_array()?.iter().filter(|d| is_normal(d));
            let ids = normal.filter_map(|d| d["pkg"].as_str().map(str::to_owned)).collect();
            packages.get_mut(node["id"].as_str()?)?.normal = ids;
        }
        Some(Self { packages })
    }
}

fn parse_package(package: &Value) -> Option<Package> {
    let text = |field| package[field].as_str().map(|t| (field, t.to_owned()));
    let declared = package["dependencies"].as_array()?.iter().map(|dependency| {
        Some(Declared {
            name: dependency["name"].as_str()?.to_owned(),
            dev: dependency["kind"] == "dev",
            requirement: dependency["req"].as_str()?.to_owned(),
        })
    });
    let targets = package["targets"].as_array()?;
    let is_script =
        |t: &Value| t["kind"].as_array().is_some_and(|k| k.contains(&"custom-build".into()));
    Some(Package {
        name: package["name"].as_str()?.to_owned(),
        manifest: None,
        // `publish` is null where nothing forbids it, and else the list of registries allowed.
        publishable: package["publish"].as_array().is_none_or(|registries| !registries.is_empty()),
        build_script: targets.iter().any(is_script),
        fields: FIELDS.into_iter().filter_map(text).collect(),
        keywords: package["keywords"].as_array()?.len(),
        declared: declared.collect::<Option<_>>()?,
        normal: Vec::new(),
    })
}

fn is_normal(dependency: &Value) -> bool {
    dependency["dep_kinds"]
        .as_array()
        .is_some_and(|kinds| kinds.iter().any(|k| k["kind"].is_null()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn package(id: &str, name: &str) -> Value {
        json!({
            "id": id, "name": name, "manifest_path": format!("/w/crates/{name}/Cargo.toml"),
            "license": "MIT", "rust_version": null, "description": "d", "readme": "README.md",
            "publish": null, "keywords": ["a", "b"], "targets": [{"kind": ["lib"]}],
            "dependencies": [],
        })
    }

    fn sample() -> Value {
        let mut core = package("1", "core");
        core["dependencies"] = json!([
            {"name": "half", "kind": null, "req": "^2.7"},
            {"name": "proptest", "kind": "dev", "req": "*"},
        ]);
        core["publish"] = json!([]);
        core["targets"] = json!([{"kind": ["lib"]}, {"kind": ["custom-build"]}]);
        let kind = |k: Value| json!([{"kind": k, "target": null}]);
        json!({
            "workspace_root": "/w",
            "workspace_members": ["1"],
            "packages": [core, package("2", "half"), package("3", "proptest")],
            "resolve": {"nodes": [
                {"id": "1", "deps": [
                    {"pkg": "2", "dep_kinds": kind(Value::Null)},
                    {"pkg": "3", "dep_kinds": kind("dev".into())},
                ]},
                {"id": "2", "deps": []},
                {"id": "3", "deps": []},
            ]},
        })
    }

    #[test]
    fn parse_keeps_normal_edges_only() {
        let metadata = Metadata::parse(&sample()).unwrap();
        assert_eq!(metadata.packages["1"].normal, ["2"]);
    }

    #[test]
    fn parse_marks_members_by_their_manifest() {
        let metadata = Metadata::parse(&sample()).unwrap();
        let members: Vec<_> = metadata.members().map(|(p, m)| (p.name.as_str(), m)).collect();
        assert_eq!(members, [("core", "crates/core/Cargo.toml")]);
    }

    #[test]
    fn parse_reads_fields_kinds_and_publish() {
        let metadata = Metadata::parse(&sample()).unwrap();
        let core = &metadata.packages["1"];
        assert!(!core.publishable && core.build_script && metadata.packages["2"].publishable);
        assert_eq!(core.keywords, 2);
        assert_eq!(
            core.fields.keys().copied().collect::<Vec<_>>(),
            ["description", "license", "readme"]
        );
        let declared: Vec<_> = core.declared.iter().map(|d| (d.name.as_str(), d.dev)).collect();
        assert_eq!(declared, [("half", false), ("proptest", true)]);
    }

    #[test]
    fn parse_refuses_other_json() {
        assert!(Metadata::parse(&json!({"packages": []})).is_none());
    }

    #[test]
    fn metadata_of_this_workspace_has_this_package() {
        let metadata = Metadata::read().unwrap();
        let (package, _) = metadata.members().find(|(_, m)| *m == "xtask/Cargo.toml").unwrap();
        assert!(package.normal.len() >= 2 && !package.publishable);
    }
}
