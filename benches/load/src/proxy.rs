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
    let listener = TcpListener::bind(args.listen)?;
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
                if let Some(at) = asked.lock().expect("nobody panics with it").take() {
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
