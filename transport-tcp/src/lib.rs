//! The device over TCP: ranks that share no memory talk through authenticated connections.
//!
//! ```text
//!   rank 0                                                                    rank 1
//!   Port::inject                                                              Port::advance
//!     | frame: 16-byte header, info, payload                                    ^ short bodies out of the read buffer,
//!     v                                                                         | long ones in memory of their own,
//!   out-buffer -- writev: many frames, long payloads by reference --> socket ---+ puts and answers where they belong
//!
//!   tasks of the runtime:  gate (listener, unproven sockets)   dial (one per connection being made)   vigil (hosts)
//!                             |                                   |
//!                             +--- settled connections, through the door of their context ---> port
//! ```
//!
//! # Connections
//! There is one per pair of endpoints, made when the first message wants it, and never twice: a lost one is a lost peer
//! (an *incarnation* is fenced off for ever). What is injected meanwhile waits in the link's out-buffer; nothing is
//! written before both sides have settled that this is *the* connection. If both connect at once, the lower endpoint's
//! attempt wins: it refuses the other with *yield* once its own has shown the other side who it is, and may have been accepted by that
//! one. Until then it accepts, as it may not be able to reach the other at all, through a firewall, say. Who cannot be let in yet and
//! will be, into a context that nobody moves for the time being, is told to *wait*, and waits as long as that takes. Connecting,
//! accepting and the [handshake] are tasks of the runtime; after it the socket belongs to its port, which reads and writes it directly.
//! A context talks to itself without a socket, and a rank accesses its own memory at once; between contexts of a rank there is a
//! connection as between any others.
//!
//! A rank that died may be started again ([`TcpDevice::restarted`]): whoever knows says where its next incarnation listens.
//! Each port first gives up what it had of the earlier one and is then *admitted* to the new one; until then whatever is
//! for that rank is refused, and connections that the new one makes are told to try again. Each connection, and each end
//! of one, is of one incarnation, so that late news of an old one end nothing.
//!
//! # Progress and waking up
//! Up to two connections are read at every `advance` without asking; more are asked for with one `epoll_wait`. A message
//! is written at once if nothing was written since the last `advance`; those after it wait for the next one, which
//! writes them together, and for which the driver is woken; inside `advance` all is written at its end. So a lone message
//! has the latency of one system call, and a burst costs one for many. While a port sleeps, its epoll instance is entered
//! in another one that the runtime watches; while it is awake it is not, and packets wake nobody.
//!
//! # Room
//! A link's out-buffer is bounded ([`Limits::outgoing`]): past it `inject` says *full*, and the engine queues and waits.
//! A lent payload from 16 KiB on is taken only where nothing waits before it, and not inside `advance`: what the kernel does
//! not take of it at once is copied, and so is all of it as long as there is no connection. Else the engine keeps it as owned
//! bytes, which wait without being copied. Received messages are handed on before more is read; what the sink holds, and
//! everything behind it, stays in the kernel, so that its sender has to wait and nobody else.
//!
//! # Puts and gets
//! A put is a frame that is read straight into its place; the target counts those that are done and says how many, once
//! per batch, and that ends them. A get asks for parts of at most [`Limits::get_chunk`] within a window
//! ([`Limits::get_window`]), so that the target, which copies them out as it reads the question, never keeps more than the
//! window for it and never stops reading: a later put cannot change the answer, and two ranks that get from each other
//! cannot wait for each other. What names memory that its owner has not got is read and told, and ends with `NoSuchMemory`.
//! Memory of another device ([`Memory::Of`]) is what that one says it has, so that none of a dropped region is there; memory
//! of this device's own ([`Memory::Own`]) is all of it, taken or not. A put or get that is not all on its way lets none
//! behind it pass. Order per pair: put -> put, put -> get, get -> put, put -> send, send -> send; a send that is an access to memory
//! ([`Descriptor::is_access`](posthaste_core::Descriptor::is_access)) goes as a put does. Words of puts up to 4 KiB
//! become visible whole; of longer ones a reader may see part of a word where a packet ended.
//!
//! The rest of a long payload and the next frame's header are read by one system call. A put says how many precede it
//! that are not confirmed: behind one of a row, or an answer of one, a context's only connection that has run dry is left
//! alone for 20 us, so that the next few come together and one word confirms them. So it is within a stream of long
//! messages to none of which anything was said, as long as such rests are not in vain, and when much is missing of a
//! get, or of a payload that does not go to many short places, if its buffers in the kernel are not limited to less: a
//! receiver that looks all the time takes the socket's lock and opens the window for each segment, and over loopback, where
//! the sender's core does the kernel's work for both, that costs the sender a third. A get that had to wait for its window goes on when half of it is free, one behind others
//! that bring much is asked for at the end of the round, and gets that are read together are answered by one system call.
//!
//! # The end
//! [`close`](posthaste_core::Device::close) lets each port write what it has and what the engine still brings, say *leave*
//! behind it, end its half of the stream, and read until the peer ends the other. That takes as long as a peer takes that has
//! no room, a stopped one, say, as long as its host answers; only its own end is not waited for longer than
//! [`Times::linger`]. The end of a stream after *leave* is `PeerClosed`, told to each context when its connections with that
//! rank have ended, and to all when all have; any other end is `PeerLost`, at once. An impossible frame, or a record that is
//! not genuine, is `PeerCorrupt`. A vanished host is noticed by the kernel's keep-alive, asked for the
//! last acknowledgement: a process that is stopped, computes or has no room is not lost. While there is no room the kernel asks
//! for some instead, as often as that on Linux from 6.15 on, and else ever more rarely, at last every two minutes; then it is
//! missed that the other host's own keep-alive comes no more, if that came in a row before, nothing else did meanwhile, and nothing is unread here.
//!
//! # Use
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use posthaste_core::{JobShape, Rank};
//! use posthaste_tcp::{AddressBook, JobKey, PeerAddress, TcpConfig, TcpDevice};
//! use std::sync::Arc;
//!
//! let shape = JobShape { ranks: 2, clients: 1, contexts: 1 };
//! let book = Arc::new(AddressBook::new(shape.ranks));
//! let config = TcpConfig::new(Rank(0), shape, *b"one name per job", JobKey::new([7; 32]))
//!     .bind("192.0.2.1:0".parse()?);
//! let device = TcpDevice::new(config, book.clone())?;
//! println!("rank 0 listens on {}", device.address());
//! // Whoever starts the job tells everybody where the others are, now or later.
//! book.set(Rank(1), PeerAddress { address: "192.0.2.2:4000".parse()?, incarnation: 1 });
//! # Ok(())
//! # }
//! ```
//!
//! # Other systems
//! Nothing here needs Linux. Without epoll all connections are read at each `advance`, and a sleeping port looks every
//! millisecond; without Unix, puts go through the read buffer. Where the system does not tell what a peer's host has
//! acknowledged, a close waits for no longer than peers may linger once all is with the kernel.
#![forbid(unsafe_code)]

mod bell;
mod book;
mod config;
mod device;
mod dial;
pub mod frame;
mod gate;
pub mod handshake;
mod hub;
mod ledger;
mod link;
mod memory;
mod outgoing;
mod port;
mod record;
mod rx;
mod socket;
mod throttle;
mod tx;
#[cfg(all(unix, not(feature = "portable")))]
mod vigil;
mod watch;

pub use book::{AddressBook, PeerAddress};
pub use config::{JobKey, KEY_LEN, Limits, Memory, Mode, TcpConfig, Times};
pub use device::TcpDevice;
