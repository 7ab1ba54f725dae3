//! The proxy's faults, and that servers start, die and come back.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use rfs_testkit::{
    Fault, FaultProxy, S3Server, SeaweedFs, TestCertificate, Versitygw, VersitygwOptions, or_skip,
};

/// A server that sends back what it gets.
fn echo() -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let mut buffer = [0; 1024];
                while let Ok(len @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..len]).is_err() {
                        break;
                    }
                }
            });
        }
    });
    address
}

fn connect(proxy: &FaultProxy) -> TcpStream {
    let stream = TcpStream::connect(proxy.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    stream
}

fn say(stream: &mut TcpStream, text: &str) -> std::io::Result<String> {
    stream.write_all(text.as_bytes())?;
    let mut buffer = [0; 1024];
    let len = stream.read(&mut buffer)?;
    Ok(String::from_utf8_lossy(&buffer[..len]).into_owned())
}

#[test]
fn proxy_faults_switch_while_it_runs() {
    let proxy = FaultProxy::start(echo()).unwrap();
    let mut stream = connect(&proxy);
    assert_eq!(say(&mut stream, "hello").unwrap(), "hello");

    proxy.set(Fault::BlackHole);
    assert!(say(&mut stream, "lost").is_err(), "a black hole does not answer");

    proxy.set(Fault::None);
    assert!(say(&mut stream, "again").is_ok_and(|s| s.is_empty()) || stream.peek(&mut [0]).is_err());
    let mut stream = connect(&proxy);
    assert_eq!(say(&mut stream, "new").unwrap(), "new");

    proxy.set(Fault::Truncate(2));
    let mut stream = connect(&proxy);
    assert_eq!(say(&mut stream, "four").unwrap(), "fo");
    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);

    proxy.set(Fault::Status(503));
    let mut stream = connect(&proxy);
    let mut answer = say(&mut stream, "PUT /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc").unwrap();
    // TCP may deliver the answer in several pieces.
    let mut piece = [0; 1024];
    while !answer.contains("</Error>") {
        let len = stream.read(&mut piece).unwrap();
        assert_ne!(len, 0, "the answer ends early: {answer}");
        answer.push_str(std::str::from_utf8(&piece[..len]).unwrap());
    }
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("<Code>SlowDown</Code>"), "{answer}");
    assert_eq!(proxy.faults_injected(), 2);

    proxy.set(Fault::Reset);
    let mut stream = connect(&proxy);
    assert!(say(&mut stream, "x").map_or(true, |s| s.is_empty()));
}

/// Starts, kills and restarts; the files are still there.
fn lives_and_dies(server: &mut dyn S3Server) {
    server.create_bucket("first").unwrap();
    server.create_bucket("first").unwrap();
    server.kill();
    assert!(TcpStream::connect(server.address()).is_err(), "{} still listens", server.name());
    server.restart().unwrap();
    assert!(TcpStream::connect(server.address()).is_ok());
}

#[test]
fn versitygw_restarts_on_its_port() {
    let Some(mut server) = or_skip(Versitygw::start()) else { return };
    lives_and_dies(&mut server);
    assert!(server.bucket_dir("first").is_dir());
}

#[test]
fn versitygw_serves_https() {
    let Some(tls) = or_skip(TestCertificate::create()) else { return };
    let options = VersitygwOptions { tls: Some(tls), ..VersitygwOptions::default() };
    let Some(server) = or_skip(Versitygw::start_with(options)) else { return };
    assert!(server.endpoint().starts_with("https://localhost:"));
    assert!(server.ca_bundle().unwrap().is_file());
}

#[test]
fn seaweedfs_restarts_on_its_port() {
    let Some(mut server) = or_skip(SeaweedFs::start()) else { return };
    lives_and_dies(&mut server);
}
