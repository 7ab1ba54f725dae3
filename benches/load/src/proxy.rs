//! A faraway store: forwards a port, delays the first byte of every answer, and limits bytes a second.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;

/// Where from, where to, how slow.
#[derive(Args)]
pub(crate) struct ProxyArgs {
    /// Address to listen at.
    #[arg(long)]
    listen: SocketAddr,
    /// Address to forward to.
    #[arg(long)]
    to: SocketAddr,
    /// Milliseconds that every request takes longer.
    #[arg(long, default_value_t = 0)]
    latency_ms: u64,
    /// Most MiB a second in each direction, all connections together; 0 is no limit.
    #[arg(long, default_value_t = 0)]
    mib_per_second: u64,
}

/// Serves until killed.
pub(crate) fn run(args: &ProxyArgs) -> Result<()> {
    serve(&TcpListener::bind(args.listen)?, args)
}

fn serve(listener: &TcpListener, args: &ProxyArgs) -> Result<()> {
    let up = Arc::new(Limit::new(args.mib_per_second << 20));
    let down = Arc::new(Limit::new(args.mib_per_second << 20));
    let latency = Duration::from_millis(args.latency_ms);
    for client in listener.incoming() {
        let client = client?;
        let Ok(server) = TcpStream::connect(args.to) else { continue };
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        // Whether the next byte from the server begins an answer: set by every byte of the client.
        let asked = Arc::new(Mutex::new(None::<Instant>));
        let (client_read, server_write) = (client.try_clone()?, server.try_clone()?);
        let (up, down, asked_by) = (Arc::clone(&up), Arc::clone(&down), Arc::clone(&asked));
        std::thread::spawn(move || {
            forward(client_read, server_write, &up, || {
                *asked_by.lock().expect("nobody panics with it") = Some(Instant::now());
            });
        });
        std::thread::spawn(move || {
            forward(server, client, &down, || {
                // Taken before the sleep, so that the client can already send its next request.
                let asked_at = asked.lock().expect("nobody panics with it").take();
                if let Some(at) = asked_at {
                    std::thread::sleep(latency.saturating_sub(at.elapsed()));
                }
            });
        });
    }
    Ok(())
}

/// Copies until an end or an error, which ends the connection.
fn forward(mut from: TcpStream, mut to: TcpStream, limit: &Limit, before: impl Fn()) {
    let mut buffer = vec![0; 256 << 10];
    while let Ok(n) = from.read(&mut buffer) {
        if n == 0 {
            break;
        }
        before();
        limit.take(n as u64);
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    // Errors mean that it is closed already.
    let _ = to.shutdown(Shutdown::Write);
}

/// Bytes a second, shared.
struct Limit {
    bytes_per_second: u64,
    next: Mutex<Instant>,
}

impl Limit {
    fn new(bytes_per_second: u64) -> Limit {
        Limit { bytes_per_second, next: Mutex::new(Instant::now()) }
    }

    /// Waits for the turn of `bytes`.
    fn take(&self, bytes: u64) {
        if self.bytes_per_second == 0 {
            return;
        }
        let wait = {
            let mut next = self.next.lock().expect("nobody panics with it");
            let now = Instant::now();
            let begin = (*next).max(now);
            *next = begin + Duration::from_nanos(bytes * 1_000_000_000 / self.bytes_per_second);
            begin - now
        };
        std::thread::sleep(wait);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: Duration = Duration::from_millis(30);

    /// A server that answers each byte with `answer` bytes, behind a proxy; the proxy's address.
    fn far_server(answer: usize, mib_per_second: u64) -> SocketAddr {
        let server = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let to = server.local_addr().expect("it is bound");
        std::thread::spawn(move || {
            for client in server.incoming() {
                let mut client = client.expect("a connection");
                std::thread::spawn(move || {
                    while client.read_exact(&mut [0]).is_ok() && client.write_all(&vec![1; answer]).is_ok() {}
                });
            }
        });
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let listen = listener.local_addr().expect("it is bound");
        let latency_ms = u64::try_from(LATENCY.as_millis()).expect("it is short");
        let args = ProxyArgs { listen, to, latency_ms, mib_per_second };
        std::thread::spawn(move || serve(&listener, &args));
        listen
    }

    /// Sends `count` requests one after the other on one connection; how long that took.
    fn ask(address: SocketAddr, count: u32, answer: usize) -> Duration {
        let mut connection = TcpStream::connect(address).expect("the proxy listens");
        let begin = Instant::now();
        for _ in 0..count {
            connection.write_all(&[0]).expect("the proxy reads");
            connection.read_exact(&mut vec![0; answer]).expect("the server answers");
        }
        begin.elapsed()
    }

    #[test]
    fn every_request_takes_the_latency_once_however_long_its_answer() {
        let address = far_server(3 << 20, 0);
        let took = ask(address, 5, 3 << 20);
        assert!(took >= LATENCY * 5, "{took:?}");
        // An answer of 3 MiB passes in a dozen pieces or more: delayed piece by piece it would take several times as long.
        assert!(took < LATENCY * 5 * 4, "{took:?}");
    }

    #[test]
    fn connections_do_not_wait_for_each_other() {
        let address = far_server(1, 0);
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| ask(address, 5, 1));
            }
        });
        let took = begin.elapsed();
        assert!(took >= LATENCY * 5 && took < LATENCY * 5 * 8, "{took:?} for 16 connections");
    }

    #[test]
    fn all_connections_share_the_bandwidth() {
        let address = far_server(2 << 20, 20);
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| ask(address, 1, 2 << 20));
            }
        });
        // 8 MiB at 20 MiB a second; the last piece of each connection need not be waited for.
        let took = begin.elapsed();
        assert!(took >= Duration::from_millis(300), "{took:?}");
    }
}
