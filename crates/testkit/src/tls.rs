//! A throw-away certificate for `localhost`, made by the `openssl` program.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::StartError;
use crate::process::find_program;

/// A certificate for `localhost` and 127.0.0.1, signed by a certificate authority of its own.
#[derive(Debug)]
pub struct TestCertificate {
    ca: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
    _dir: TempDir,
}

impl TestCertificate {
    /// Makes one, valid for two days.
    ///
    /// # Errors
    /// `NotInstalled` without `openssl`, `Failed` with what it said.
    pub fn create() -> Result<TestCertificate, StartError> {
        let openssl = find_program("openssl")?;
        let dir = TempDir::with_prefix("rfs-tls-")?;
        let path = |name: &str| dir.path().join(name);
        std::fs::write(
            path("leaf.cnf"),
            "basicConstraints=CA:FALSE\nsubjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth\n",
        )?;
        let run = |args: &[&str]| -> Result<(), StartError> {
            let output =
                Command::new(&openssl).args(args).current_dir(dir.path()).stdin(Stdio::null()).output()?;
            if output.status.success() {
                return Ok(());
            }
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            Err(StartError::Failed(format!("openssl {}: {said}", args.join(" "))))
        };
        let new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
        let ca =
            ["req", "-x509", "-days", "2", "-subj", "/CN=rfs test CA", "-keyout", "ca.key", "-out", "ca.pem"];
        run(&[ca.as_slice(), &new_key].concat())?;
        let leaf = ["req", "-subj", "/CN=localhost", "-keyout", "leaf.key", "-out", "leaf.csr"];
        run(&[leaf.as_slice(), &new_key].concat())?;
        run(&[
            "x509",
            "-req",
            "-days",
            "2",
            "-in",
            "leaf.csr",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-extfile",
            "leaf.cnf",
            "-out",
            "leaf.pem",
        ])?;
        Ok(TestCertificate {
            ca: path("ca.pem"),
            certificate: path("leaf.pem"),
            key: path("leaf.key"),
            _dir: dir,
        })
    }

    /// The PEM file of the authority, which clients must trust.
    pub fn ca_bundle(&self) -> &Path {
        &self.ca
    }

    /// The PEM file of the server's certificate.
    pub fn certificate(&self) -> &Path {
        &self.certificate
    }

    /// The PEM file of the server's key.
    pub fn key(&self) -> &Path {
        &self.key
    }
}
