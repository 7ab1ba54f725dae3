//! A TCP proxy in front of a server whose network and answers can be made to fail while it runs.
//!
//! One thread accepts, two threads carry a connection. It knows of HTTP only as much as [`Fault::Status`] needs.
//!
//! Lock order: `fault`, then `connections`.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use crate::process::pause;

/// What a [`FaultProxy`] does to the traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: everything is forwarded.
    None,
    /// Every answer begins this much later.
    Latency(Duration),
    /// Answers flow at this many bytes a second and connection.
    Throttle(u32),
    /// Every request is answered with this HTTP status (503: with S3's `SlowDown`) and never reaches the server.
    Status(u16),
    /// As [`Fault::Status`] with 503, on every n-th connection only; the others are forwarded.
    Flaky(u32),
    /// Bytes are taken and nothing ever comes back, on open connections and new ones.
    BlackHole,
    /// Connections are closed as soon as they are made, and open ones at once.
    Reset,
    /// A connection is closed after this many bytes of answers: bodies end early.
    Truncate(u64),
    /// One bit of each body that is sent, if it is longer than 8 KiB, arrives as another.
    Damage,
}

/// What is read from a client at once and is longer ends with a body, since the heads of requests are shorter.
const HEAD_BYTES_MAX: usize = 8 << 10;

impl Fault {
    /// Whether connections made before this fault began must be closed for it to show.
    fn closes_open_connections(self) -> bool {
        match self {
            Fault::None | Fault::Latency(_) | Fault::Throttle(_) | Fault::BlackHole | Fault::Damage => false,
            Fault::Status(_) | Fault::Flaky(_) | Fault::Reset | Fault::Truncate(_) => true,
        }
    }
}

/// One carried connection: both ends, kept to close them from outside.
type Ends = (TcpStream, TcpStream);

#[derive(Debug)]
struct Shared {
    upstream: SocketAddr,
    fault: Mutex<Fault>,
    connections: Mutex<HashMap<u64, Ends>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    accepted: AtomicU64,
    faulted: AtomicU64,
    stopping: AtomicBool,
}

/// A running proxy; ends when dropped, and closes what it carries.
#[derive(Debug)]
pub struct FaultProxy {
    shared: Arc<Shared>,
    address: SocketAddr,
    acceptor: Option<JoinHandle<()>>,
}

impl FaultProxy {
    /// Starts one on a free loopback port, in front of `upstream`, with [`Fault::None`].
    ///
    /// # Errors
    /// No port or no thread left.
    pub fn start(upstream: SocketAddr) -> std::io::Result<FaultProxy> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            upstream,
            fault: Mutex::new(Fault::None),
            connections: Mutex::default(),
            threads: Mutex::default(),
            accepted: AtomicU64::new(0),
            faulted: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        let acceptor = std::thread::Builder::new()
            .name("fault-proxy".to_owned())
            .spawn(move || accepting.accept(&listener))?;
        Ok(FaultProxy { shared, address, acceptor: Some(acceptor) })
    }

    /// Where clients connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `http://127.0.0.1:PORT`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Switches to `fault`; it holds when this returns.
    pub fn set(&self, fault: Fault) {
        let mut current = self.shared.fault.lock();
        let left = std::mem::replace(&mut *current, fault);
        // What a black hole swallowed is missing on its connections for ever.
        if fault.closes_open_connections() || (left == Fault::BlackHole && fault != left) {
            self.shared.close_all();
        }
    }

    /// Connections accepted so far.
    pub fn connections_accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::Relaxed)
    }

    /// Requests answered with an error, and connections reset or cut, so far.
    pub fn faults_injected(&self) -> u64 {
        self.shared.faulted.load(Ordering::Relaxed)
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        // Wakes the acceptor, which then sees that it has to stop.
        let _ = TcpStream::connect(self.address);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        self.shared.close_all();
        let threads = std::mem::take(&mut *self.shared.threads.lock());
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for client in listener.incoming() {
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            let Ok(client) = client else { continue };
            let id = self.accepted.fetch_add(1, Ordering::Relaxed) + 1;
            let shared = Arc::clone(self);
            let carrier = std::thread::Builder::new().name("fault-proxy-conn".to_owned()).spawn(move || {
                // A broken connection is what this is about; nobody wants to hear of it.
                let _ = shared.carry(id, client);
                shared.connections.lock().remove(&id);
            });
            let mut threads = self.threads.lock();
            threads.retain(|thread| !thread.is_finished());
            threads.extend(carrier.ok());
        }
    }

    fn close_all(&self) {
        for (client, server) in self.connections.lock().values() {
            let _ = client.shutdown(Shutdown::Both);
            let _ = server.shutdown(Shutdown::Both);
        }
    }

    fn carry(&self, id: u64, client: TcpStream) -> std::io::Result<()> {
        client.set_nodelay(true)?;
        let fault = *self.fault.lock();
        match fault {
            Fault::Reset => {
                self.faulted.fetch_add(1, Ordering::Relaxed);
                return client.shutdown(Shutdown::Both);
            }
            Fault::Status(status) => return self.refuse(id, client, status),
            Fault::Flaky(every) if id.is_multiple_of(u64::from(every.max(1))) => {
                return self.refuse(id, client, 503);
            }
            Fault::None
            | Fault::Latency(_)
            | Fault::Throttle(_)
            | Fault::Flaky(_)
            | Fault::BlackHole
            | Fault::Truncate(_)
            | Fault::Damage => {}
        }
        let server = TcpStream::connect(self.upstream)?;
        server.set_nodelay(true)?;
        self.register(id, (client.try_clone()?, server.try_clone()?));
        let asked = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| self.requests(&client, &server, &asked));
            self.answers(&server, &client, &asked);
        });
        Ok(())
    }

    /// Makes a connection closable, unless a fault that would have closed it began in between.
    fn register(&self, id: u64, ends: Ends) {
        let fault = self.fault.lock();
        if self.stopping.load(Ordering::SeqCst) || *fault == Fault::Reset {
            let _ = ends.0.shutdown(Shutdown::Both);
        }
        self.connections.lock().insert(id, ends);
    }

    fn requests(&self, mut client: &TcpStream, mut server: &TcpStream, asked: &AtomicBool) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(len @ 1..) = client.read(&mut buffer) {
            match *self.fault.lock() {
                Fault::BlackHole => continue,
                Fault::Damage if len > HEAD_BYTES_MAX => {
                    buffer[len - 1] ^= 1;
                    self.faulted.fetch_add(1, Ordering::Relaxed);
                }
                _ => {}
            }
            asked.store(true, Ordering::SeqCst);
            if server.write_all(&buffer[..len]).is_err() {
                break;
            }
        }
        let _ = server.shutdown(Shutdown::Write);
    }

    fn answers(&self, mut server: &TcpStream, mut client: &TcpStream, asked: &AtomicBool) {
        let mut buffer = vec![0; 64 << 10];
        let mut carried: u64 = 0;
        while let Ok(len @ 1..) = server.read(&mut buffer) {
            let fault = *self.fault.lock();
            let mut keep = len;
            match fault {
                Fault::None | Fault::Flaky(_) | Fault::Status(_) | Fault::Reset | Fault::Damage => {}
                Fault::BlackHole => continue,
                Fault::Latency(latency) => {
                    if asked.swap(false, Ordering::SeqCst) {
                        pause(latency);
                    }
                }
                Fault::Throttle(rate) => {
                    let micros = (len as u64).saturating_mul(1_000_000) / u64::from(rate.max(1));
                    pause(Duration::from_micros(micros));
                }
                Fault::Truncate(limit) => {
                    let left = limit.saturating_sub(carried);
                    keep = len.min(usize::try_from(left).unwrap_or(usize::MAX));
                }
            }
            carried += keep as u64;
            if client.write_all(&buffer[..keep]).is_err() {
                break;
            }
            if keep < len {
                self.faulted.fetch_add(1, Ordering::Relaxed);
                let _ = server.shutdown(Shutdown::Both);
                break;
            }
        }
        let _ = client.shutdown(Shutdown::Both);
    }

    /// Takes one request with its body, answers it with `status` and closes.
    fn refuse(&self, id: u64, mut client: TcpStream, status: u16) -> std::io::Result<()> {
        self.register(id, (client.try_clone()?, client.try_clone()?));
        client.set_read_timeout(Some(Duration::from_secs(5)))?;
        let mut head = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        let end = loop {
            if let Some(at) = head.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            match client.read(&mut buffer)? {
                0 => return Ok(()),
                len => head.extend_from_slice(&buffer[..len]),
            }
        };
        let text = String::from_utf8_lossy(&head[..end]).to_ascii_lowercase();
        let length: usize = text
            .lines()
            .find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok())
            .unwrap_or(0);
        // A client that waits for 100-continue sends its body only after that; it gets its answer at once.
        if !text.contains("\r\nexpect: 100-continue") {
            let mut left = length.saturating_sub(head.len() - end);
            while left > 0 {
                match client.read(&mut buffer)? {
                    0 => break,
                    len => left = left.saturating_sub(len),
                }
            }
        }
        self.faulted.fetch_add(1, Ordering::Relaxed);
        let (code, message) = match status {
            503 => ("SlowDown", "Please reduce your request rate."),
            500 => ("InternalError", "We encountered an internal error. Please try again."),
            _ => ("Injected", "Injected by the test."),
        };
        let body = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        );
        let body = if text.starts_with("head ") { "" } else { &body };
        write!(
            client,
            "HTTP/1.1 {status} Injected\r\nContent-Type: application/xml\r\nContent-Length: {}\r\n\
             Connection: close\r\n\r\n{body}",
            body.len()
        )?;
        client.shutdown(Shutdown::Write)?;
        // Closing with unread bytes would reset the connection and lose the answer.
        while let Ok(1..) = client.read(&mut buffer) {}
        Ok(())
    }
}
