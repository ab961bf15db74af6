//! Everybody talks to everybody, or to the root, directly.

use super::super::schedule::{Action, Blocks, Kind, Place, Program, Route};
use super::blocks_of;

pub(super) fn program(kind: Kind, place: &Place<'_>) -> Option<Program> {
    let Place { rank, size, root, .. } = *place;
    let mut route = Route::default();
    // The others, each rank beginning behind itself, so that they do not all go to the same one first.
    let others = || (1..size).map(|distance| (rank + distance) % size);
    let block = |other: usize| if kind.has_block_per_rank() { other } else { 0 };
    match kind {
        Kind::Broadcast | Kind::Scatter if rank == root => {
            others().for_each(|other| route.send(0, other, Blocks::one(block(other))));
        }
        Kind::Broadcast | Kind::Scatter => {
            route.receive(0, root, Blocks::one(block(rank)), Action::Store);
        }
        Kind::Reduce | Kind::Gather if rank == root => {
            let action = if kind == Kind::Reduce { Action::Append } else { Action::Store };
            others().for_each(|other| route.receive(0, other, Blocks::one(block(other)), action));
        }
        Kind::Reduce | Kind::Gather => route.send(0, root, Blocks::one(block(rank))),
        Kind::Barrier => {
            for other in others() {
                route.send(0, other, Blocks::one(0));
                route.receive(0, other, Blocks::one(0), Action::Append);
            }
        }
        Kind::AllGather => {
            for other in others() {
                route.send(0, other, Blocks::one(rank));
                route.receive(0, other, Blocks::one(other), Action::Store);
            }
        }
        Kind::AllToAll => {
            for other in others() {
                route.send(0, other, Blocks::one(other));
                route.receive(0, other, Blocks::one(other), Action::Store);
            }
        }
        Kind::ReduceScatter => {
            for other in others() {
                route.send(0, other, Blocks::one(other));
                route.receive(0, other, Blocks::one(rank), Action::Append);
            }
        }
        // A part of the vector for each rank, which combines it and gives it to all.
        Kind::AllReduce => {
            for other in others() {
                route.send(0, other, Blocks::one(other));
                route.receive(0, other, Blocks::one(rank), Action::Append);
            }
            for other in others() {
                route.send(1, other, Blocks::one(rank));
                route.receive(1, other, Blocks::one(other), Action::Store);
            }
        }
    }
    let blocks = if kind == Kind::AllReduce { size } else { blocks_of(kind, size) };
    Some(Program::new(blocks, route))
}
