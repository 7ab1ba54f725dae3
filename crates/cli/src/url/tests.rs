use super::*;

fn meta_error(text: &str) -> String {
    text.parse::<MetaUrl>().expect_err("the URL is wrong")
}

fn store_error(text: &str) -> String {
    text.parse::<StoreUrl>().expect_err("the URL is wrong")
}

#[test]
fn metadata_urls_read_and_print() {
    assert_eq!("redb:///a/b.redb".parse(), Ok(MetaUrl::Redb("/a/b.redb".into())));
    assert_eq!("/a/../c/b.redb".parse(), Ok(MetaUrl::Redb("/c/b.redb".into())));
    let here = std::env::current_dir().expect("there is one");
    assert_eq!("b.redb".parse(), Ok(MetaUrl::Redb(here.join("b.redb"))));
    let spaced: MetaUrl = "redb:///a%20b/c%3F.redb".parse().expect("it is valid");
    assert_eq!(spaced, MetaUrl::Redb("/a b/c?.redb".into()));
    assert_eq!(spaced.to_string(), "redb:///a%20b/c%3F.redb");
    let fdb: MetaUrl = "fdb:///etc/c.cluster?prefix=team".parse().expect("it is valid");
    assert_eq!(fdb, MetaUrl::Fdb { cluster_file: "/etc/c.cluster".into(), prefix: "team".into() });
    assert_eq!(fdb.to_string(), "fdb:///etc/c.cluster?prefix=team");
    let default = MetaUrl::Fdb { cluster_file: FDB_CLUSTER_FILE.into(), prefix: FDB_PREFIX.into() };
    assert_eq!("fdb://".parse(), Ok(default));
}

#[test]
fn wrong_metadata_urls_say_what_to_write() {
    assert!(meta_error("redb://a/b.redb").contains("redb:///a/b.redb"));
    assert!(meta_error("redis://host/1").contains("use redb:///"));
    assert!(meta_error("s3://bucket").contains("comes first"));
    assert!(meta_error("redb:///a?size=1").contains("unknown setting 'size'"));
    assert!(meta_error("redb:///").contains("names no file"));
    assert!(meta_error("").contains("empty"));
    assert!(meta_error("fdb:///c?prefix=").contains("must not be empty"));
}

#[test]
fn store_urls_read_and_print() {
    assert_eq!("file:///a/b".parse(), Ok(StoreUrl::File("/a/b".into())));
    assert_eq!("/a/b".parse(), Ok(StoreUrl::File("/a/b".into())));
    let text = "s3://bucket/some/prefix?endpoint=http://127.0.0.1:7070&region=us-east-1";
    let url: StoreUrl = text.parse().expect("it is valid");
    assert_eq!(url, StoreUrl::S3(text.to_owned()));
    assert_eq!(url.to_string(), text);
}

#[test]
fn wrong_store_urls_say_what_to_write() {
    assert!(store_error("http://localhost:9000/bucket").contains("endpoint="));
    assert!(store_error("gs://b").contains("unknown store scheme"));
    assert!(store_error("file://a/b").contains("three slashes"));
}

#[test]
fn a_target_is_a_volume_or_a_mount_point() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("meta.redb");
    std::fs::write(&file, b"").expect("it is writable");
    let text = |path: &Path| path.to_str().expect("it is UTF-8").to_owned();
    assert_eq!(text(dir.path()).parse(), Ok(Target::Mountpoint(dir.path().to_owned())));
    assert_eq!(text(&file).parse(), Ok(Target::Meta(MetaUrl::Redb(file.clone()))));
    assert_eq!(format!("redb://{}", text(&file)).parse(), Ok(Target::Meta(MetaUrl::Redb(file))));
}

#[test]
fn spellings_of_one_path_are_one_volume() {
    let dir = tempfile::tempdir().expect("a directory");
    let real = canonical(dir.path()).join("real");
    std::fs::create_dir(&real).expect("it is writable");
    std::os::unix::fs::symlink(&real, dir.path().join("link")).expect("it is writable");
    let through_link = MetaUrl::Redb(dir.path().join("link/meta.redb"));
    assert_eq!(through_link.canonical(), MetaUrl::Redb(real.join("meta.redb")));
}
