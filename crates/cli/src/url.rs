//! Where a volume's metadata and contents are: `META_URL` and `STORE_URL`, read from and written as text.
//!
//! Parsing does no I/O, but relative paths are made absolute against the current directory: URLs are kept in the volume
//! and compared between processes. Credentials are never part of a URL.

use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use url::Url;

/// Cluster file that FoundationDB's own tools use.
const FDB_CLUSTER_FILE: &str = "/etc/foundationdb/fdb.cluster";
/// Prefix of a volume's keys in FoundationDB.
const FDB_PREFIX: &str = "rfs";
/// What a path keeps unescaped in a URL.
const PATH_ESCAPES: &AsciiSet =
    &CONTROLS.add(b' ').add(b'%').add(b'?').add(b'#').add(b'"').add(b'<').add(b'>');

/// What a setting's value keeps unescaped in a URL.
const VALUE_ESCAPES: &AsciiSet = &PATH_ESCAPES.add(b'&').add(b'+').add(b'=');

/// Where names and attributes live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MetaUrl {
    /// A local file, owned by one process at a time.
    Redb(PathBuf),
    /// A FoundationDB cluster, shared by many.
    Fdb {
        /// Tells where the cluster is.
        cluster_file: PathBuf,
        /// Tells volumes of one cluster apart.
        prefix: String,
    },
}

impl FromStr for MetaUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<MetaUrl, String> {
        let Some((scheme, _)) = text.split_once("://") else {
            return match text {
                "" => Err("empty metadata URL".to_owned()),
                path => Ok(MetaUrl::Redb(absolute(Path::new(path))?)),
            };
        };
        match scheme {
            "redb" => {
                let url = parse(text)?;
                let path = local_path(&url, text)?;
                Query::of(&url)?.finish("redb")?;
                Ok(MetaUrl::Redb(path))
            }
            "fdb" => {
                let url = parse(text)?;
                let mut query = Query::of(&url)?;
                let prefix = query.take("prefix").unwrap_or_else(|| FDB_PREFIX.to_owned());
                query.finish("fdb")?;
                let cluster_file = match url.path() {
                    "" | "/" if url.host().is_none() => PathBuf::from(FDB_CLUSTER_FILE),
                    _ => local_path(&url, text)?,
                };
                if prefix.is_empty() {
                    return Err("the prefix of an fdb:// URL must not be empty".to_owned());
                }
                Ok(MetaUrl::Fdb { cluster_file, prefix })
            }
            "s3" | "file" => Err(format!(
                "'{scheme}://' is a store, not a metadata URL: the metadata URL comes first, as in \
                 'redb:///path/meta.redb {text}'"
            )),
            _ => Err(format!(
                "unknown metadata scheme '{scheme}://': use redb:///path/meta.redb or \
                 fdb:///etc/foundationdb/fdb.cluster?prefix=rfs"
            )),
        }
    }
}

impl MetaUrl {
    /// The same URL with symbolic links of its path resolved as far as it exists, so that two spellings of one volume
    /// compare equal.
    pub(crate) fn canonical(&self) -> MetaUrl {
        match self {
            MetaUrl::Redb(path) => MetaUrl::Redb(canonical(path)),
            MetaUrl::Fdb { cluster_file, prefix } => {
                MetaUrl::Fdb { cluster_file: canonical(cluster_file), prefix: prefix.clone() }
            }
        }
    }

    /// Whether only one process at a time can open the volume.
    pub(crate) fn is_exclusive(&self) -> bool {
        match self {
            MetaUrl::Redb(_) => true,
            MetaUrl::Fdb { .. } => false,
        }
    }

    /// Where bytes are staged unless told otherwise: beside metadata that lies on a local disk. `None`: nowhere.
    pub(crate) fn staging_dir(&self) -> Option<PathBuf> {
        self.beside(".staging")
    }

    /// Where contents are cached unless told otherwise. `None`: nowhere.
    pub(crate) fn cache_dir(&self) -> Option<PathBuf> {
        self.beside(".cache")
    }

    /// The metadata file's path with `suffix`, where the metadata is a file.
    fn beside(&self, suffix: &str) -> Option<PathBuf> {
        match self {
            MetaUrl::Redb(path) => {
                let mut beside = path.clone().into_os_string();
                beside.push(suffix);
                Some(beside.into())
            }
            MetaUrl::Fdb { .. } => None,
        }
    }
}

impl fmt::Display for MetaUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetaUrl::Redb(path) => write!(f, "redb://{}", escape_path(path)),
            MetaUrl::Fdb { cluster_file, prefix } => {
                write!(f, "fdb://{}?prefix={}", escape_path(cluster_file), escape_value(prefix))
            }
        }
    }
}

/// Where file contents live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoreUrl {
    /// A local directory.
    File(PathBuf),
    /// An S3-compatible bucket; the text is read by the engine, which owns its settings.
    S3(String),
}

impl FromStr for StoreUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<StoreUrl, String> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return match text {
                "" => Err("empty store URL".to_owned()),
                path => Ok(StoreUrl::File(absolute(Path::new(path))?)),
            };
        };
        match scheme {
            "file" => {
                let url = parse(text)?;
                let path = local_path(&url, text)?;
                Query::of(&url)?.finish("file")?;
                Ok(StoreUrl::File(path))
            }
            "s3" => Ok(StoreUrl::S3(text.to_owned())),
            "http" | "https" => Err(format!(
                "'{scheme}://' is not a store: name the bucket and give the server as endpoint, as in \
                 's3://bucket/prefix?endpoint={scheme}://{}'",
                rest.split('/').next().unwrap_or_default()
            )),
            "redb" | "fdb" => {
                Err(format!("'{scheme}://' is metadata, not a store: the store URL comes second"))
            }
            _ => Err(format!(
                "unknown store scheme '{scheme}://': use s3://bucket/prefix?endpoint=… or file:///path"
            )),
        }
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreUrl::File(path) => write!(f, "file://{}", escape_path(path)),
            StoreUrl::S3(text) => f.write_str(text),
        }
    }
}

/// What a command acts on: a volume by its metadata, or by where it is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// A volume, mounted or not.
    Meta(MetaUrl),
    /// A mounted volume.
    Mountpoint(PathBuf),
}

impl FromStr for Target {
    type Err = String;

    /// A URL is metadata; so is the path of a regular file. Every other path is taken for a mount point.
    fn from_str(text: &str) -> Result<Target, String> {
        if text.contains("://") {
            return text.parse().map(Target::Meta);
        }
        if text.is_empty() {
            return Err("empty path".to_owned());
        }
        let path = absolute(Path::new(text))?;
        Ok(if path.is_file() { Target::Meta(MetaUrl::Redb(path)) } else { Target::Mountpoint(path) })
    }
}

fn parse(text: &str) -> Result<Url, String> {
    Url::parse(text).map_err(|e| format!("'{text}' is not a URL: {e}"))
}

/// The path of a URL that names a local file.
fn local_path(url: &Url, text: &str) -> Result<PathBuf, String> {
    if let Some(host) = url.host_str().filter(|host| !host.is_empty()) {
        let scheme = url.scheme();
        return Err(format!(
            "'{text}' names the host '{host}': a local path needs three slashes, as in {scheme}:///{host}{}",
            url.path()
        ));
    }
    let path = decode(url.path())?;
    if path.is_empty() || path == "/" {
        return Err(format!("'{text}' names no file: write {}:///path", url.scheme()));
    }
    absolute(Path::new(&path))
}

fn decode(text: &str) -> Result<String, String> {
    let decoded = percent_decode_str(text).decode_utf8();
    decoded
        .map(std::borrow::Cow::into_owned)
        .map_err(|_| format!("'{text}' is not UTF-8 when its % escapes are resolved"))
}

fn escape_path(path: &Path) -> String {
    utf8_percent_encode(&path.to_string_lossy(), PATH_ESCAPES).to_string()
}

fn escape_value(value: &str) -> String {
    utf8_percent_encode(value, VALUE_ESCAPES).to_string()
}

/// `path` seen from the root, without `.` and `..`.
pub(crate) fn absolute(path: &Path) -> Result<PathBuf, String> {
    let full = std::path::absolute(path).map_err(|e| format!("'{}': {e}", path.display()))?;
    let mut out = PathBuf::new();
    for component in full.components() {
        match component {
            Component::ParentDir => {
                out.pop();
            }
            other => out.push(other),
        }
    }
    Ok(out)
}

/// `path` with its links resolved; what does not exist yet stays as it is.
pub(crate) fn canonical(path: &Path) -> PathBuf {
    if let Ok(found) = path.canonicalize() {
        return found;
    }
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => canonical(parent).join(name),
        _ => path.to_owned(),
    }
}

/// The part of a URL behind the question mark, each name to be used once.
struct Query(Vec<(String, String)>);

impl Query {
    fn of(url: &Url) -> Result<Query, String> {
        let mut settings: Vec<(String, String)> = Vec::new();
        let raw = url.query().unwrap_or_default();
        for pair in raw.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) =
                pair.split_once('=').ok_or_else(|| format!("'{pair}' in the URL has no value"))?;
            if settings.iter().any(|(known, _)| known == name) {
                return Err(format!("'{name}' is twice in the URL"));
            }
            settings.push((name.to_owned(), decode(value)?));
        }
        Ok(Query(settings))
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let index = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.swap_remove(index).1)
    }

    /// Refuses what nobody took.
    fn finish(self, scheme: &str) -> Result<(), String> {
        let Some((name, _)) = self.0.first() else { return Ok(()) };
        let known = match scheme {
            "fdb" => "prefix",
            _ => "no settings",
        };
        Err(format!("unknown setting '{name}' in the URL: {scheme}:// knows {known}"))
    }
}

#[cfg(test)]
mod tests;
