//! The end of a port's connections, in order.

use super::Tx;
use crate::frame::{Header, LEAVE};
use crate::hub::Progress;
use crate::link::Leave;
use std::net::Shutdown;
use zerocopy::IntoBytes;

/// Looks at a link, in a row, after which nobody is taken to have anything for it any more.
const QUIET: u8 = 2;
/// And looks altogether, if nothing waits for room: of a rank that goes on asking, the answers have no end.
const MANY: u8 = 64;

impl Tx {
    /// The device closes: what is quiet is ended in order, behind what waits to be written. Returns how far that has come.
    pub fn close(&mut self) -> Progress {
        let mut progress = if self.local.is_empty() { Progress::Closed } else { Progress::Owes };
        for index in 0..self.links.len() {
            let Some(link) = &mut self.links[index] else { continue };
            if link.dead.is_some() {
                continue;
            }
            if link.stream.is_none() {
                // It is of use only if something waits for it, and it can still come to be.
                let waits = !link.out.is_empty() || link.job.is_some();
                if waits && self.hub.is_coming(self.me.context, link.peer) {
                    progress = Progress::Owes;
                }
                continue;
            }
            match link.leave {
                Leave::No => {
                    progress = Progress::Owes;
                    link.quiet = link.quiet.saturating_add(1);
                    link.looks = link.looks.saturating_add(1);
                    let quiet = link.quiet > QUIET || (link.looks >= MANY && !link.wanted);
                    let rank = self.hub.shape.endpoint(index).rank;
                    // What another context has sent there must not find the door closed.
                    let all_there = !self.hub.is_connecting_to(rank);
                    if quiet && link.job.is_none() && all_there {
                        link.confirm();
                        link.out.small().extend_from_slice(Header::control(LEAVE, 0, 0).as_bytes());
                        link.leave = Leave::Said;
                        self.touch(index);
                    }
                }
                Leave::Said if link.is_flushed() || link.broken => {
                    progress = progress.min(Progress::Out);
                    if let Some(stream) = &link.stream {
                        // A broken one needs no ending.
                        let _ = stream.shutdown(Shutdown::Write);
                    }
                    link.leave = Leave::Done;
                }
                Leave::Said => progress = Progress::Owes,
                // The peer ends its side when it has read that.
                Leave::Done => progress = progress.min(Progress::Out),
            }
        }
        progress
    }

    /// Whether a link has come to its end as far as it can without its peer, or without room.
    pub fn can_close_more(&self) -> bool {
        self.links.iter().flatten().filter(|link| link.stream.is_some() && link.dead.is_none()).any(|link| {
            match link.leave {
                // What is quiet waits for connections that another context is making; their end is told at the door.
                Leave::No => {
                    link.job.is_none()
                        // The kernel tells when it has room for what comes again.
                        && !(link.refused && link.blocked)
                        && (link.quiet <= QUIET || !self.hub.is_connecting_to(link.peer.rank))
                }
                Leave::Said => link.is_flushed() || link.broken,
                Leave::Done => false,
            }
        })
    }
}
