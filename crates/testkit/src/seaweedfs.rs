//! `SeaweedFS`: master, volume server, filer and S3 gateway in one process.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use crate::process::{ServerProcess, find_program, free_ports};
use crate::{S3Server, StartError};

/// The identity file: one user who may do everything.
const IDENTITIES: &str = r#"{"identities": [{"name": "rfs",
  "credentials": [{"accessKey": "rfs-test-key", "secretKey": "rfs-test-secret"}],
  "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}"#;

/// The options of `weed server` that take a port, in the order of [`SeaweedFs::ports`].
const PORT_OPTIONS: [&str; 8] = [
    "-s3.port",
    "-filer.port",
    "-master.port",
    "-volume.port",
    "-s3.port.grpc",
    "-filer.port.grpc",
    "-master.port.grpc",
    "-volume.port.grpc",
];

/// A running `SeaweedFS`; ends when dropped. It takes about five seconds to come up.
#[derive(Debug)]
pub struct SeaweedFs {
    program: PathBuf,
    ports: [u16; PORT_OPTIONS.len()],
    process: Option<ServerProcess>,
    dir: TempDir,
}

impl SeaweedFs {
    /// Starts one on free loopback ports and an empty temporary directory.
    ///
    /// # Errors
    /// `NotInstalled`, or `Failed` with the end of its log.
    pub fn start() -> Result<SeaweedFs, StartError> {
        let program = find_program("weed")?;
        let dir = TempDir::with_prefix("rfs-seaweedfs-")?;
        std::fs::create_dir(dir.path().join("data"))?;
        std::fs::write(dir.path().join("identities.json"), IDENTITIES)?;
        let mut server = SeaweedFs { program, ports: free_ports()?, process: None, dir };
        server.restart()?;
        Ok(server)
    }

    fn local(port: u16) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, port))
    }

    fn filer(&self) -> SocketAddr {
        Self::local(self.ports[1])
    }
}

/// The status of a bare HTTP request without a body, 0 if nobody answers.
fn http_status(address: SocketAddr, method: &str, path: &str) -> u16 {
    let exchange = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )?;
        let mut answer = [0; 64];
        let len = stream.read(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer[..len]).into_owned())
    };
    exchange().ok().and_then(|head| head.split(' ').nth(1)?.parse().ok()).unwrap_or(0)
}

impl S3Server for SeaweedFs {
    fn name(&self) -> &'static str {
        "SeaweedFS"
    }

    fn endpoint(&self) -> String {
        format!("http://{}", self.address())
    }

    fn address(&self) -> SocketAddr {
        Self::local(self.ports[0])
    }

    fn access_key(&self) -> &'static str {
        "rfs-test-key"
    }

    fn secret_key(&self) -> &'static str {
        "rfs-test-secret"
    }

    fn create_bucket(&self, bucket: &str) -> std::io::Result<()> {
        // The filer takes unsigned requests, which spares this crate an S3 client.
        match http_status(self.filer(), "POST", &format!("/buckets/{bucket}/")) {
            201 | 409 => Ok(()),
            status => {
                Err(std::io::Error::other(format!("cannot make bucket {bucket}: HTTP status {status}")))
            }
        }
    }

    fn kill(&mut self) {
        self.process = None;
    }

    fn restart(&mut self) -> Result<(), StartError> {
        self.kill();
        let dir = self.dir.path();
        let mut command = Command::new(&self.program);
        command
            .arg("server")
            .arg("-dir")
            .arg(dir.join("data"))
            .args(["-ip", "127.0.0.1", "-ip.bind", "127.0.0.1", "-filer", "-s3"])
            .args(["-s3.port.iceberg", "0", "-s3.port.lance", "0"])
            .args(["-master.volumeSizeLimitMB", "128", "-volume.max", "32"])
            .arg("-s3.config")
            .arg(dir.join("identities.json"));
        for (option, port) in PORT_OPTIONS.iter().zip(self.ports) {
            command.arg(option).arg(port.to_string());
        }
        let (s3, filer) = (self.address(), self.filer());
        let ready = || {
            http_status(s3, "GET", "/") == 403
                && matches!(http_status(filer, "POST", "/buckets/rfs-ready/"), 201 | 409)
        };
        self.process = Some(ServerProcess::start(command, &dir.join("log"), ready)?);
        Ok(())
    }
}
