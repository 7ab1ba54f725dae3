//! versitygw over a plain directory: buckets are directories in it.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::process::{ServerProcess, answers, find_program, free_port};
use crate::{S3Server, StartError, TestCertificate};

/// How to start a [`Versitygw`]. The default is http, on a directory of its own.
#[derive(Debug, Default)]
pub struct VersitygwOptions {
    /// The directory whose subdirectories are the buckets; a temporary one if `None`.
    pub root: Option<PathBuf>,
    /// Serve https with this certificate.
    pub tls: Option<TestCertificate>,
}

/// A running versitygw with its posix backend; ends when dropped.
#[derive(Debug)]
pub struct Versitygw {
    program: PathBuf,
    root: PathBuf,
    port: u16,
    tls: Option<TestCertificate>,
    process: Option<ServerProcess>,
    dir: TempDir,
}

impl Versitygw {
    const ACCESS_KEY: &'static str = "rfs-test-key";
    const SECRET_KEY: &'static str = "rfs-test-secret";

    /// Starts one over http on a free loopback port and an empty temporary directory.
    ///
    /// # Errors
    /// `NotInstalled`, or `Failed` with the end of its log.
    pub fn start() -> Result<Versitygw, StartError> {
        Self::start_with(VersitygwOptions::default())
    }

    /// Starts one as `options` say.
    ///
    /// # Errors
    /// `NotInstalled`, or `Failed` with the end of its log.
    pub fn start_with(options: VersitygwOptions) -> Result<Versitygw, StartError> {
        let program = find_program("versitygw")?;
        let dir = TempDir::with_prefix("rfs-versitygw-")?;
        let root = options.root.unwrap_or_else(|| dir.path().join("root"));
        std::fs::create_dir_all(&root)?;
        let mut server =
            Versitygw { program, root, port: free_port()?, tls: options.tls, process: None, dir };
        if server.restart().is_err() {
            // Somebody took the port between the look and the use.
            server.port = free_port()?;
            server.restart()?;
        }
        Ok(server)
    }

    /// The directory that holds `bucket`'s objects as plain files.
    pub fn bucket_dir(&self, bucket: &str) -> PathBuf {
        self.root.join(bucket)
    }

    /// The certificate authority that clients of an https server must trust.
    pub fn ca_bundle(&self) -> Option<&Path> {
        self.tls.as_ref().map(TestCertificate::ca_bundle)
    }

    /// The file that its output goes to.
    pub fn log_path(&self) -> PathBuf {
        self.dir.path().join("log")
    }
}

impl S3Server for Versitygw {
    fn name(&self) -> &'static str {
        "versitygw"
    }

    fn endpoint(&self) -> String {
        match self.tls {
            Some(_) => format!("https://localhost:{}", self.port),
            None => format!("http://127.0.0.1:{}", self.port),
        }
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.port))
    }

    fn access_key(&self) -> &str {
        Self::ACCESS_KEY
    }

    fn secret_key(&self) -> &str {
        Self::SECRET_KEY
    }

    fn create_bucket(&self, bucket: &str) -> std::io::Result<()> {
        std::fs::create_dir_all(self.bucket_dir(bucket))
    }

    fn kill(&mut self) {
        self.process = None;
    }

    fn restart(&mut self) -> Result<(), StartError> {
        self.kill();
        let mut command = Command::new(&self.program);
        command
            .env("ROOT_ACCESS_KEY", Self::ACCESS_KEY)
            .env("ROOT_SECRET_KEY", Self::SECRET_KEY)
            .args(["--quiet", "--keep-alive", "--port"])
            .arg(format!("127.0.0.1:{}", self.port));
        if let Some(tls) = &self.tls {
            command.arg("--cert").arg(tls.certificate()).arg("--key").arg(tls.key());
        }
        command.arg("posix").arg(&self.root);
        let address = self.address();
        self.process = Some(ServerProcess::start(command, &self.log_path(), || answers(address))?);
        Ok(())
    }
}
