//! Tells the devices over sockets which ranks are gone, also those that this rank never had a connection with, and which
//! were started again.

use crate::join::listens;
use posthaste_core::{Fault, JobShape, Rank};
use posthaste_launch::{Bulletin, Notice};
use posthaste_tcp::{PeerAddress, TcpDevice};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// The task that listens.
pub(crate) struct Herald {
    task: JoinHandle<()>,
    farewell: oneshot::Sender<Return>,
}

/// How long the task may take to hand over what it listens with.
const PATIENCE: Duration = Duration::from_secs(2);

/// The way back for what the task listens with.
type Return = SyncSender<Bulletin>;

impl Herald {
    /// Listens for the devices of all clients. `server`: the rank that serves the news, if one does; their end without a
    /// word is its end.
    pub fn start(
        bulletin: Bulletin,
        server: Option<Rank>,
        devices: Vec<Arc<TcpDevice>>,
        shape: JobShape,
    ) -> io::Result<Herald> {
        let socket = TcpStream::from_std(bulletin.socket()?)?;
        let (farewell, leaving) = oneshot::channel::<Return>();
        let task = tokio::spawn(async move {
            let mut bulletin = bulletin;
            tokio::select! {
                biased;
                asked = leaving => {
                    if let Ok(asked) = asked {
                        // Whoever asked waits for it.
                        let _ = asked.send(bulletin);
                    }
                }
                () = listen(&socket, &mut bulletin, server, &devices, shape) => {}
            }
        });
        Ok(Herald { task, farewell })
    }

    /// Tells the others that this rank leaves in order. Blocks for a moment.
    pub fn leave(self) {
        let (sender, bulletin) = sync_channel(1);
        // Nobody listens any more if the news have ended.
        if self.farewell.send(sender).is_ok()
            // The runtime that the task is of may not be run by anybody any more.
            && let Ok(bulletin) = bulletin.recv_timeout(PATIENCE)
            && let Err(error) = bulletin.leave()
        {
            tracing::debug!(%error, "the others could not be told that this rank leaves");
        }
        self.task.abort();
    }
}

async fn listen(
    socket: &TcpStream,
    bulletin: &mut Bulletin,
    server: Option<Rank>,
    devices: &[Arc<TcpDevice>],
    shape: JobShape,
) {
    let tell = |rank: u32, fault: fn(Rank) -> Fault| {
        for device in devices {
            device.gone(Rank(rank), fault(Rank(rank)));
        }
    };
    let restarted = |rank: u32, incarnation: u32, part: &[u8]| {
        let Some(listens) = listens(part, shape) else {
            tracing::warn!(rank, "a rank was started again and does not say where it listens");
            return;
        };
        for (device, address) in devices.iter().zip(listens) {
            device.restarted(Rank(rank), PeerAddress { address, incarnation: incarnation.into() });
        }
    };
    // Something may have come before anybody waited for the socket.
    let mut news = bulletin.read();
    loop {
        match news {
            Ok(news) => {
                for notice in news {
                    match notice {
                        Notice::Ended(rank) => tell(rank, Fault::PeerLost),
                        Notice::Left(rank) => tell(rank, Fault::PeerClosed),
                        Notice::Arrived { rank, incarnation, part } => restarted(rank, incarnation, &part),
                        // The rank that serves them has left in order, with whatever it still had to tell.
                        _ => {
                            if let Some(server) = server {
                                tell(server.0, Fault::PeerClosed);
                            }
                            return;
                        }
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::debug!(%error, "there are no more news of the other ranks");
                if let Some(server) = server {
                    tell(server.0, Fault::PeerLost);
                }
                return;
            }
        }
        let ready = socket.readable().await;
        let read = socket.try_io(tokio::io::Interest::READABLE, || {
            let news = bulletin.read()?;
            // So that the runtime waits for the socket again.
            if news.is_empty() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(news) }
        });
        news = ready.and(read);
    }
}
