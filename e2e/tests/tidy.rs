//! The arrows of ARCHITECTURE.md, enforced on the source text.
#![allow(clippy::unwrap_used, reason = "in a test a failed unwrap is a failed test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Where Rust sources are.
const SOURCES: [&str; 3] = ["crates", "e2e", "benches"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace").to_owned()
}

fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

/// The workspace's crates that a crate's library or program depends on.
fn own_dependencies(manifest: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(manifest).unwrap();
    let section = text.split("\n[").find(|section| section.starts_with("dependencies]")).unwrap_or_default();
    let names = section.lines().skip(1).filter_map(|line| line.split(['.', ' ', '=']).next());
    names.filter(|name| name.starts_with("rfs")).map(str::to_owned).collect()
}

#[test]
fn crates_depend_only_along_the_arrows() {
    let allowed: &[(&str, &[&str])] = &[
        ("kv", &[]),
        ("fdb-dlopen", &[]),
        ("meta-redb", &["rfs-kv"]),
        ("meta-fdb", &["rfs-kv", "rfs-fdb-dlopen"]),
        ("store-s3", &[]),
        ("fs-core", &["rfs-kv"]),
        ("fs-fuse", &["rfs-core"]),
        ("testkit", &[]),
        ("cli", &["rfs-kv", "rfs-meta-redb", "rfs-meta-fdb", "rfs-store-s3", "rfs-core", "rfs-fuse"]),
    ];
    let mut seen = BTreeSet::new();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let dir = entry.unwrap().path();
        let name = dir.file_name().unwrap().to_str().unwrap().to_owned();
        let (_, allowed) = allowed.iter().find(|(crate_name, _)| *crate_name == name).unwrap_or_else(|| {
            panic!("crate {name} is new: say in ARCHITECTURE.md and here what it may depend on")
        });
        for dependency in own_dependencies(&dir.join("Cargo.toml")) {
            assert!(allowed.contains(&dependency.as_str()), "crates/{name} must not depend on {dependency}");
        }
        seen.insert(name);
    }
    assert_eq!(seen.len(), allowed.len(), "a crate of the list above is gone");
}

#[test]
fn modules_of_the_core_keep_their_arrows() {
    let arrows: &[(&str, &[&str])] = &[
        ("types", &["crate::meta", "crate::data", "crate::vfs", "object_store"]),
        ("meta", &["crate::data", "crate::vfs", "object_store"]),
        ("data", &["crate::meta", "crate::vfs", "rfs_kv"]),
        ("vfs", &["fuser", "redb::", "aws_", "foundationdb"]),
    ];
    let sources = root().join("crates/fs-core/src");
    for (module, banned) in arrows {
        for file in rust_files(&sources.join(module)) {
            for (at, line) in fs::read_to_string(&file).unwrap().lines().enumerate() {
                let code = line.trim_start();
                if code.starts_with("//") {
                    continue;
                }
                for word in *banned {
                    assert!(
                        !code.contains(word),
                        "{}:{}: {module} must not know {word}",
                        file.display(),
                        at + 1
                    );
                }
            }
        }
    }
}

#[test]
fn only_the_command_line_names_engines() {
    for dir in ["crates/fs-core/src", "crates/fs-fuse/src", "crates/kv/src"] {
        for file in rust_files(&root().join(dir)) {
            let text = fs::read_to_string(&file).unwrap();
            for word in ["rfs_meta_redb", "rfs_meta_fdb", "rfs_store_s3"] {
                // Tests may run over a real engine.
                let code = text.split("#[cfg(test)]").next().unwrap_or_default();
                let in_tests = file
                    .components()
                    .any(|part| part.as_os_str().to_str().is_some_and(|p| p.starts_with("tests")));
                assert!(in_tests || !code.contains(word), "{} names {word}", file.display());
            }
        }
    }
}

#[test]
fn keys_are_built_in_one_file() {
    for file in rust_files(&root().join("crates/fs-core/src/meta/ops")) {
        let text = fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        assert!(!code.contains("to_be_bytes"), "{} builds a key; keys are meta/key.rs's", file.display());
    }
}

#[test]
fn every_module_says_what_it_is_for() {
    for dir in SOURCES {
        for file in rust_files(&root().join(dir)) {
            let text = fs::read_to_string(&file).unwrap();
            let belongs_to_a_module = file.file_name().is_some_and(|name| name == "tests.rs");
            assert!(
                belongs_to_a_module || text.starts_with("//!"),
                "{} does not open with //!",
                file.display()
            );
        }
    }
}

#[test]
fn nothing_is_left_unfinished() {
    let words = [["to", "do!("].concat(), ["unimplemented", "!("].concat(), ["FIX", "ME"].concat()];
    for dir in SOURCES {
        for file in rust_files(&root().join(dir)) {
            let text = fs::read_to_string(&file).unwrap();
            for word in &words {
                assert!(!text.contains(word.as_str()), "{} holds {word}", file.display());
            }
        }
    }
}

/// Words between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn the_architecture_names_every_crate() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let named: BTreeSet<&str> = quoted(&text).collect();
    let crates = fs::read_dir(root().join("crates")).unwrap();
    let crates = crates.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    for name in crates.chain(["e2e".to_owned(), "benches".to_owned()]) {
        let named = named.iter().any(|word| *word == name || word.starts_with(&format!("{name}::")));
        assert!(named, "ARCHITECTURE.md does not say what {name} is");
    }
}

#[test]
fn promises_name_tests_that_exist() {
    let text = fs::read_to_string(root().join("docs/semantics.md")).unwrap();
    let mut found = 0;
    for line in text.lines().filter(|line| line.starts_with('|') && line.contains("e2e:")) {
        let (_, tests) = line.split_once("e2e:").unwrap();
        for test in quoted(tests) {
            let (module, function) = test.split_once("::").unwrap_or((test, ""));
            let file = root().join("e2e/tests/it").join(module).with_extension("rs");
            let source =
                fs::read_to_string(&file).unwrap_or_else(|e| panic!("{test}: {}: {e}", file.display()));
            assert!(source.contains(&format!("fn {function}")), "docs/semantics.md: there is no {test}");
            found += 1;
        }
    }
    assert!(found >= 10, "the list of promises reads differently: only {found} tests found");
}

#[test]
fn decisions_are_numbered_one_by_one() {
    let files = fs::read_dir(root().join("docs/decisions")).unwrap();
    let mut names: Vec<String> =
        files.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    for (number, name) in (1..).zip(&names) {
        assert!(name.starts_with(&format!("{number:04}-")), "{name} is number {number}");
    }
}

#[test]
fn links_of_documents_lead_somewhere() {
    let mut documents = vec![root().join("docs/semantics.md"), root().join("benches/README.md")];
    let top = fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path());
    let decisions = fs::read_dir(root().join("docs/decisions")).unwrap().map(|entry| entry.unwrap().path());
    documents.extend(top.chain(decisions).filter(|path| path.extension().is_some_and(|ext| ext == "md")));
    for document in documents {
        let text = fs::read_to_string(&document).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = link.split('#').next().unwrap_or_default();
            let elsewhere = link.contains("://") || target.is_empty();
            let path = document.parent().expect("a file is in a directory").join(target);
            assert!(elsewhere || path.exists(), "{}: {link} leads nowhere", document.display());
        }
    }
}
