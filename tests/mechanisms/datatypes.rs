//! Non-contiguous data: programs, machines, and transfers between layouts.

use crate::support::{Options, Transport, case, here, options, payload, run, run_as, soon, transport};
use posthaste::datatype::{
    Datatype, Export, Layout, Machine, Method, Segments, SlicedMemory, Thresholds, TransferError, TypedError,
    pull, push, redistribute, redistribute_with,
};
use posthaste::{Job, Message, Rank, RegionKey, RmaError, Scope, structure};
use std::sync::{Arc, Mutex};

fn over_send() -> Options {
    options().env("POSTHASTE_OVERSEND", "always")
}

/// Every `step`th of so many numbers.
fn strided(count: u64, step: i64) -> Datatype {
    Datatype::of::<u32>().vector(count, 1, step).unwrap()
}

fn numbers(first: u32, count: u32) -> Vec<u32> {
    (first..first + count).collect()
}

fn bytes_of(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

#[repr(C)]
struct Particle {
    id: u32,
    place: [f64; 3],
    charge: i8,
}

case!(m_g01_a_program_is_told_to_another_process_which_runs_it_for_many_objects);
fn m_g01_a_program_is_told_to_another_process_which_runs_it_for_many_objects() {
    run(2, options(), async |job| {
        let window = job.shmalloc::<u8>(4096).await.unwrap();
        if job.rank() == Rank(0) {
            let particle = structure!(Particle { id: u32, place: [f64; 3], charge: i8 }).unwrap();
            // A million of them, every third: still a few instructions.
            let many = particle.vector(1_000_000, 1, 3).unwrap();
            let program = many.to_bytes();
            assert!(program.len() < 100, "{} bytes", program.len());
            window.store_slice(0, &(program.len() as u64).to_le_bytes()).unwrap();
            window.store_slice(8, &program).unwrap();
            job.barrier().await.unwrap();
        } else {
            job.barrier().await.unwrap();
            let len = window.get_slice(Rank(0), 0, 8).await.unwrap();
            let len = u64::from_le_bytes(len.try_into().unwrap()) as usize;
            let program = window.get_slice(Rank(0), 8, len).await.unwrap();
            let many = Datatype::from_bytes(&program).unwrap();
            assert_eq!((many.size(), many.chunks()), (29_000_000, 2_000_000));
            assert_eq!((many.mean_chunk(), many.extent()), (14, 3 * 40 * 999_999 + 40));
            let own = structure!(Particle { id: u32, place: [f64; 3], charge: i8 }).unwrap();
            assert_eq!(many.signature(), own.contiguous(1_000_000).unwrap().signature());
            // One program serves many objects: two of them, here, in one memory.
            let memory: Vec<u8> = (0..many.extent() + 80).map(|at| (at % 253) as u8).collect();
            for base in [0u64, 40] {
                let mut machine = Machine::new(&Layout::new(&many, 1).at(base)).unwrap();
                let mut packed = vec![0; 29_000_000];
                machine.gather(&memory, &mut packed).unwrap();
                for (index, record) in packed.chunks_exact(29).enumerate() {
                    let at = base as usize + index * 120;
                    let want = [&memory[at..at + 4], &memory[at + 8..at + 33]].concat();
                    assert_eq!(record, want, "record {index}");
                }
            }
            // What is no program is refused before it is run.
            let mut changed = program;
            *changed.last_mut().unwrap() = 9;
            Datatype::from_bytes(&changed).unwrap_err();
        }
        job.barrier().await.unwrap();
    });
}

case!(m_g02_a_machine_goes_on_with_each_message_where_the_last_one_ended);
fn m_g02_a_machine_goes_on_with_each_message_where_the_last_one_ended() {
    run(2, options(), async |job| {
        const SIZE: u64 = 4 * 10_000;
        let to_type = Datatype::of::<u32>().hvector(2_500, 4, 20).unwrap();
        let scattering =
            Arc::new(Mutex::new((Machine::new(&Layout::new(&to_type, 1)).unwrap(), vec![0xee; 2_500 * 20])));
        let (state, arrived) = (scattering.clone(), job.counter());
        let count = arrived.clone();
        let piece = job
            .register("piece", move |m: Message, _: &mut Scope| {
                let (machine, memory) = &mut *state.lock().unwrap();
                // Each piece is in a place of its own.
                let moved = machine.scatter(&mut *memory, &*m.bytes()).unwrap();
                assert_eq!(moved, m.len() as u64);
                count.add(moved);
            })
            .unwrap();
        job.barrier().await.unwrap();
        let source = bytes_of(&numbers(0, 30_000));
        let from_type = strided(10_000, 3);
        let mut gathering = Machine::new(&Layout::new(&from_type, 1)).unwrap();
        let peer = Rank(1 - job.rank().0);
        // Pieces of no relation to the blocks of either side.
        for len in [1usize, 2, 3, 5, 7, 1000, 13, 4096, 9999].into_iter().cycle() {
            if gathering.remaining() == 0 {
                break;
            }
            let mut staging = vec![0; len];
            let filled = gathering.gather(&source, &mut staging).unwrap() as usize;
            piece.send(peer, staging[..filled].to_vec()).await.unwrap();
        }
        soon("all pieces", arrived.reach(SIZE)).await;
        let (machine, memory) = scattering.lock().unwrap().clone();
        assert_eq!(machine.remaining(), 0);
        for (index, row) in memory.chunks(20).enumerate() {
            let want: Vec<u32> = (0..4).map(|column| 3 * (4 * index as u32 + column)).collect();
            assert_eq!(row[..16], bytes_of(&want), "row {index}");
            assert_eq!(row.get(16..), Some(&[0xee; 4][..]).filter(|_| row.len() == 20), "behind row {index}");
        }
        job.barrier().await.unwrap();
    });
}

/// Pushes to, and pulls from, all ranks: what must be where follows from the program alone, and both variants check it.
async fn pushes_and_pulls(job: Job) {
    const SIDE: u64 = 300;
    let (me, size) = (job.rank().0, job.size() as u32);
    let row = Datatype::of::<u32>().contiguous(SIDE).unwrap();
    let column = Datatype::of::<u32>().vector(SIDE, 1, SIDE as i64).unwrap().resized(0, 4).unwrap();
    let window = job.shmalloc::<u32>((SIDE * SIDE) as usize * size as usize).await.unwrap();
    let part = SIDE * SIDE * 4;
    let mine = numbers(me << 20, (SIDE * SIDE) as u32);
    for to in job.ranks() {
        // Rows become columns at the target, in this rank's part of it.
        let there = Layout::new(&column, SIDE).at(u64::from(me) * part);
        window.put_typed(to, &there, &mine, &Layout::new(&row, SIDE)).await.unwrap();
        // Behind it, in program order.
        let corner = (u64::from(me) * SIDE * SIDE) as usize;
        assert_eq!(window.get(to, corner + 1).await.unwrap(), mine[SIDE as usize]);
    }
    job.barrier().await.unwrap();
    let own = window.to_vec();
    for from in 0..size {
        let block = &own[(from as u64 * SIDE * SIDE) as usize..][..(SIDE * SIDE) as usize];
        for (index, number) in block.iter().enumerate() {
            let (i, j) = (index as u32 / SIDE as u32, index as u32 % SIDE as u32);
            assert_eq!(*number, (from << 20) + j * SIDE as u32 + i, "element {i}, {j} of rank {from}");
        }
    }
    for from in job.ranks() {
        // Every third column of a peer's part, each into every second place of a row.
        let here = Datatype::of::<u32>().vector(SIDE, 1, 2).unwrap().resized(0, 8 * SIDE as i64).unwrap();
        let sparse = column.resized(0, 12).unwrap();
        let there = Layout::new(&sparse, SIDE / 3).at(u64::from(me) * part);
        let into = vec![7; (SIDE / 3 * SIDE * 2) as usize];
        let got = window.get_typed(from, &there, into, &Layout::new(&here, SIDE / 3)).await.unwrap();
        for (index, pair) in got.chunks_exact(2).enumerate() {
            let (i, j) = (index as u32 / SIDE as u32, index as u32 % SIDE as u32);
            assert_eq!(pair, [(me << 20) + 3 * i * SIDE as u32 + j, 7], "element {i}, {j} from {from}");
        }
    }
    job.barrier().await.unwrap();
    window.free().await.unwrap();
}

case!(m_g03_layouts_are_pushed_and_pulled_straight_through_the_mapping);
fn m_g03_layouts_are_pushed_and_pulled_straight_through_the_mapping() {
    if transport() != Transport::Shm {
        // Nothing of a peer is mapped.
        return;
    }
    run_as(here!(), 3, options(), async |job| {
        pushes_and_pulls(job.clone()).await;
        let stats = job.handle().stats();
        assert_eq!(stats.one_sided, 0, "nothing was asked of the peers");
    });
}

case!(m_g03_layouts_are_pushed_and_pulled_over_sends);
fn m_g03_layouts_are_pushed_and_pulled_over_sends() {
    run_as(here!(), 3, over_send(), async |job| {
        pushes_and_pulls(job.clone()).await;
    });
}

case!(m_g03_large_layouts_are_moved_over_sends_in_parts);
fn m_g03_large_layouts_are_moved_over_sends_in_parts() {
    run(2, over_send(), async |job| {
        // More than a request moves: many of them, each going on in the middle of a block.
        const COUNT: u64 = 100_003;
        let block = Datatype::of::<u32>().contiguous(15).unwrap();
        let there = block.hvector(COUNT, 1, 64).unwrap();
        let window = job.shmalloc::<u32>((COUNT * 16) as usize).await.unwrap();
        let peer = Rank(1 - job.rank().0);
        let mine = numbers(job.rank().0 << 28, 15 * COUNT as u32);
        let (to, from) = (Layout::new(&there, 1), Layout::new(&block, COUNT));
        window.put_typed(peer, &to, &mine, &from).await.unwrap();
        job.barrier().await.unwrap();
        let own = window.to_vec();
        for (index, row) in own.chunks_exact(16).enumerate() {
            let first = (peer.0 << 28) + 15 * index as u32;
            assert_eq!((&row[..15], row[15]), (&numbers(first, 15)[..], 0), "block {index}");
        }
        let back = window.get_typed(peer, &to, vec![0; 15 * COUNT as usize], &from).await.unwrap();
        assert!(back == mine);
        job.barrier().await.unwrap();
    });
}

/// The bytes of a region in which number `index` of `source` is the one at `place(index)`, from that byte on.
fn placed(len: usize, base: usize, source: &[u32], place: impl Fn(usize) -> usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (index, number) in source.iter().enumerate() {
        bytes[base + 4 * place(index)..][..4].copy_from_slice(&number.to_ne_bytes());
    }
    bytes
}

case!(m_g03_layouts_are_put_to_and_got_from_regions);
fn m_g03_layouts_are_put_to_and_got_from_regions() {
    const LEN: usize = 2_100_000;
    for oversend in ["auto", "always"] {
        run(2, options().env("POSTHASTE_OVERSEND", oversend), async |job| {
            let peer = Rank(1 - job.rank().0);
            let region = job.region(LEN).await.unwrap();
            let table = job.region_from(vec![0; LEN]).unwrap();
            let keys = job.world().all_gather(&[region.key(), table.key()]).await.unwrap();
            let theirs = &keys[2 * peer.index()..][..2];
            let word = Datatype::of::<u32>();
            // Few bytes, some, and more than one request moves; straight, and packed where it is mapped.
            for (count, granularity) in [(5, 0), (1000, 0), (1000, 1 << 20), (100_003, 0)] {
                let blocks = word.hvector(count, 3, 20).unwrap();
                let (every_other, row) =
                    (word.vector(3 * count, 1, 2).unwrap(), Layout::new(&word, 3 * count));
                let thresholds = Thresholds { granularity, ..Thresholds::default() };
                // Region and table of either rank have numbers and a base of their own.
                let base_of = |of: usize| 4 * (7 + of) + 1;
                let first_of = |of: usize, rank: Rank| ((1 + rank.0 + 2 * of as u32) << 24) + count as u32;
                for (of, key) in theirs.iter().enumerate() {
                    let remote = job.remote_region(*key).await.unwrap();
                    let there = Layout::new(&blocks, 1).at(base_of(of) as u64);
                    let mine = numbers(first_of(of, job.rank()), 3 * count as u32);
                    let spread: Vec<u32> = mine.iter().flat_map(|number| [*number, 9]).collect();
                    let from = Layout::new(&every_other, 1);
                    remote.put_typed_with(&thresholds, &there, &spread, &from).await.unwrap();
                    // Behind it, in program order; what lies between the places is as it was.
                    let into = vec![7; spread.len()];
                    let got = remote.get_typed_with(&thresholds, &there, into, &from).await.unwrap();
                    let want: Vec<u32> = mine.iter().flat_map(|number| [*number, 7]).collect();
                    assert!(got == want, "{count} blocks of {of}");
                    assert!(remote.get_typed(&there, mine.clone(), &row).await.unwrap() == mine);
                }
                job.barrier().await.unwrap();
                let mut own = vec![0; LEN];
                region.read(0, &mut own).unwrap();
                for (of, own) in [own, table.with(|bytes| bytes.clone())].into_iter().enumerate() {
                    let theirs = numbers(first_of(of, peer), 3 * count as u32);
                    let want = placed(LEN, base_of(of), &theirs, |index| index / 3 * 5 + index % 3);
                    assert!(own == want, "{count} blocks in the memory of {of}");
                }
                job.barrier().await.unwrap();
                region.write(0, &vec![0; LEN]).unwrap();
                table.with(|bytes| bytes.fill(0));
                job.barrier().await.unwrap();
            }
        });
    }
}

/// Tells which segments were attached.
struct Told(SlicedMemory, Vec<u64>);

impl Segments for Told {
    fn segment_size(&self) -> u64 {
        self.0.segment_size()
    }

    fn attach(&mut self, segment: u64) -> Option<posthaste::components::core::memory::SharedSlice> {
        self.1.push(segment);
        self.0.attach(segment)
    }
}

case!(m_g04_an_exported_object_is_attached_segment_by_segment);
fn m_g04_an_exported_object_is_attached_segment_by_segment() {
    if transport() != Transport::Shm {
        // Nothing of a peer is mapped.
        return;
    }
    run(2, options(), async |job| {
        let blocks = Datatype::of::<u32>().hvector(100, 5, 44).unwrap();
        let local = Datatype::of::<u32>().contiguous(500).unwrap();
        let board = job.shmalloc::<u8>(1024).await.unwrap();
        let region = job.region(10_000).await.unwrap();
        let peer = Rank(1 - job.rank().0);
        // Handle, base, count and program, in shared memory.
        let export = Export { handle: region.key(), base: 36, count: 2, datatype: blocks.clone() };
        let told = export.to_bytes();
        board.store_slice(0, &(told.len() as u64).to_le_bytes()).unwrap();
        board.store_slice(8, &told).unwrap();
        region.write(0, &bytes_of(&numbers(job.rank().0 << 20, 2500))).unwrap();
        job.barrier().await.unwrap();
        let len = board.get_slice(peer, 0, 8).await.unwrap();
        let len = u64::from_le_bytes(len.try_into().unwrap()) as usize;
        let import = Export::from_bytes(&board.get_slice(peer, 8, len).await.unwrap()).unwrap();
        assert_eq!((import.rank(), import.base, import.count), (peer, 36, 2));
        let remote = job.remote_region(import.handle).await.unwrap();
        let number = |index: u64| {
            (peer.0 << 20) + (36 + index / 500 * 4376 + index % 500 / 5 * 44) as u32 / 4 + (index % 5) as u32
        };
        let want: Vec<u32> = (0..1000).map(number).collect();
        // Small segments, whose ends lie within blocks and within numbers.
        for size in [4096u64, 1000, 64, 21, 3] {
            let mut segments = Told(remote.segments(size).unwrap(), Vec::new());
            let mut out = vec![0; 4000];
            pull(&mut out, &Layout::new(&local, 2), &mut segments, &import).unwrap();
            assert_eq!(out, bytes_of(&want), "segments of {size}");
            let attached = &segments.1;
            assert!(attached.windows(2).all(|pair| pair[0] < pair[1]), "one after the other: {attached:?}");
            assert_eq!(attached.first(), Some(&(36 / size)));
            assert_eq!(attached.last(), Some(&((36 + 4376 + 99 * 44 + 20 - 1) / size)));
        }
        job.barrier().await.unwrap();
        for (round, size) in [1000u64, 7].into_iter().enumerate() {
            let mine = numbers(1 + 1000 * round as u32 + 5000 * job.rank().0, 1000);
            let mut segments = remote.segments(size).unwrap();
            push(&mut segments, &import, &bytes_of(&mine), &Layout::new(&local, 2)).unwrap();
            job.barrier().await.unwrap();
            // The peer's, in this rank's own memory: what is between the blocks is as it was.
            let mut own = vec![0; 10_000];
            region.read(0, &mut own).unwrap();
            let mut expected = bytes_of(&numbers(job.rank().0 << 20, 2500));
            let theirs = bytes_of(&numbers(1 + 1000 * round as u32 + 5000 * peer.0, 1000));
            redistribute(&mut expected, &Layout::new(&blocks, 2).at(36), &theirs, &Layout::new(&local, 2))
                .unwrap();
            assert!(own == expected, "segments of {size}");
            job.barrier().await.unwrap();
        }
    });
}

case!(m_g05_to_itself_a_rank_copies_without_attaching_anything);
fn m_g05_to_itself_a_rank_copies_without_attaching_anything() {
    run(2, options(), async |job| {
        // The source document's matrix: 10 × 10 numbers of 4 bytes, the elements of a column adjacent.
        let row = strided(10, 10);
        let column = Datatype::of::<u32>().contiguous(10).unwrap();
        let matrix = numbers(100 * job.rank().0, 100);
        let window = job.shmalloc::<u32>(100).await.unwrap();
        for which in 0..10u64 {
            let (to, from) = (Layout::new(&column, 1).at(40 * which), Layout::new(&row, 1).at(4 * which));
            window.put_typed(job.rank(), &to, &matrix, &from).await.unwrap();
        }
        let transposed = window.to_vec();
        for (index, number) in transposed.iter().enumerate() {
            assert_eq!(*number, matrix[index % 10 * 10 + index / 10]);
        }
        let mut private = vec![0; 400];
        let rows = row.resized(0, 4).unwrap();
        redistribute(
            &mut private,
            &Layout::new(&rows, 10),
            &bytes_of(&transposed),
            &Layout::new(&column, 10),
        )
        .unwrap();
        assert_eq!(private, bytes_of(&matrix));
        assert_eq!(job.handle().stats().one_sided, 0);
        job.barrier().await.unwrap();
    });
}

case!(m_g06_the_mean_chunk_travels_with_the_program_and_decides_with_the_size);
fn m_g06_the_mean_chunk_travels_with_the_program_and_decides_with_the_size() {
    run(2, options(), async |job| {
        let peer = Rank(1 - job.rank().0);
        let fine = strided(1000, 2);
        let coarse = Datatype::of::<u32>().vector(10, 100, 101).unwrap();
        let board = job.shmalloc::<u8>(100).await.unwrap();
        let program = fine.to_bytes();
        board.store_slice(0, &program).unwrap();
        job.barrier().await.unwrap();
        let theirs = Datatype::from_bytes(&board.get_slice(peer, 0, program.len()).await.unwrap()).unwrap();
        assert_eq!((theirs.mean_chunk(), coarse.mean_chunk()), (4, 400));
        let window = job.shmalloc::<u32>(2000).await.unwrap();
        let source = numbers(0, 2000);
        let (to, from) = (Layout::new(&theirs, 1), Layout::new(&coarse, 1));
        for (granularity, size, method) in [
            (3, 0, Method::Direct),
            (4, 0, Method::Staged),
            (0, 4000, Method::Direct),
            (0, 4001, Method::Staged),
        ] {
            let thresholds = Thresholds { granularity, size, staging: 100 };
            assert_eq!(thresholds.method(&to, &from), method);
            // What is done to mapped memory says which way it went.
            let own = window.own_memory().unwrap();
            let taken = redistribute_with(&thresholds, own, &to, &bytes_of(&source), &from).unwrap();
            assert_eq!(taken, method, "{granularity}, {size}");
            assert_eq!(window.to_vec()[..4], [0, 0, 1, 0]);
            job.barrier().await.unwrap();
            // Either way the same arrives.
            window.put_slice(peer, 0, &[0; 2000]).await.unwrap();
            window.put_typed_with(&thresholds, peer, &to, &source, &from).await.unwrap();
            let there = window.get_slice(peer, 0, 2000).await.unwrap();
            for (index, pair) in there.chunks_exact(2).enumerate() {
                assert_eq!(pair, [(index / 100 * 101 + index % 100) as u32, 0], "{method:?}");
            }
            let into = vec![0; 1010];
            let back = window.get_typed_with(&thresholds, peer, &to, into, &from).await.unwrap();
            for (index, number) in back.iter().enumerate().take(1009) {
                assert_eq!(*number, if index % 101 == 100 { 0 } else { index as u32 }, "{method:?}");
            }
            job.barrier().await.unwrap();
        }
    });
}

case!(m_g07_layouts_need_the_same_elements_and_not_the_same_shape);
fn m_g07_layouts_need_the_same_elements_and_not_the_same_shape() {
    run(2, options(), async |job| {
        let peer = Rank(1 - job.rank().0);
        let particle = structure!(Particle { id: u32, place: [f64; 3], charge: i8 }).unwrap();
        // The same elements in another order of memory: places first, then ids, then charges; padded differently.
        let planes = Datatype::structure(&[
            (24 * 5000, 1, Datatype::of::<u32>()),
            (0, 3, Datatype::of::<f64>()),
            (28 * 5000, 1, Datatype::of::<i8>()),
        ])
        .unwrap();
        assert_eq!(planes.signature(), particle.signature());
        let got = Arc::new(Mutex::new(Vec::new()));
        let (into, here, arrived) = (got.clone(), planes.clone(), job.counter());
        let count = arrived.clone();
        let send = job
            .register("particles", move |m: Message, _: &mut Scope| {
                let mut memory = vec![0u8; 29 * 5000];
                let words = Datatype::of::<u32>();
                let refused = m.scatter(&mut memory, &Layout::new(&words, m.len() as u64 / 4));
                assert!(matches!(refused, Err(TransferError::Signature { .. })), "{refused:?}");
                assert!(memory.iter().all(|byte| *byte == 0), "nothing was moved");
                let each = m.len() as u64 / 29;
                assert_eq!(m.signature().unwrap().elements, 5 * each);
                // One record: its fields lie far from each other.
                if each == 1 {
                    assert_eq!(m.scatter(&mut memory, &Layout::new(&here, 1)), Ok(29));
                    into.lock().unwrap().push(memory);
                }
                count.add(1);
            })
            .unwrap();
        job.barrier().await.unwrap();
        let memory: Vec<u8> = (0..40 * 500).map(|at| (at % 251) as u8).collect();
        for index in [0u64, 7] {
            let layout = Layout::new(&particle, 1).at(40 * index);
            send.send_typed(peer, &memory, &layout).unwrap().await.unwrap();
        }
        // Long ones are packed where the peer reads them.
        send.send_typed(peer, &memory, &Layout::new(&particle, 500)).unwrap().await.unwrap();
        soon("the messages", arrived.reach(3)).await;
        for (index, out) in [0usize, 7].into_iter().zip(&*got.lock().unwrap()) {
            let record = &memory[40 * index..40 * index + 40];
            assert_eq!(out[..24], record[8..32]);
            assert_eq!((&out[24 * 5000..][..4], out[28 * 5000]), (&record[..4], record[32]));
        }
        assert_eq!(job.stats().panics, 0);
        job.barrier().await.unwrap();
    });
}

case!(m_g07_long_messages_of_one_layout_are_scattered_into_another);
fn m_g07_long_messages_of_one_layout_are_scattered_into_another() {
    run(2, options(), async |job| {
        let peer = Rank(1 - job.rank().0);
        let particle = structure!(Particle { id: u32, place: [f64; 3], charge: i8 }).unwrap();
        let (got, arrived) = (Arc::new(Mutex::new(Vec::new())), job.counter());
        let (into, here, count) = (got.clone(), particle.clone(), arrived.clone());
        let send = job
            .register("particles", move |m: Message, _: &mut Scope| {
                // Every third record of what the receiver has, from the second on.
                let each = m.len() as u64 / 29;
                let spread = here.resized(0, 120).unwrap();
                let mut memory = vec![0xee_u8; 40 * (3 * each as usize + 1)];
                let layout = Layout::new(&spread, each).at(40);
                assert_eq!(m.scatter(&mut memory, &layout), Ok(29 * each));
                into.lock().unwrap().push(memory);
                count.add(1);
            })
            .unwrap();
        job.barrier().await.unwrap();
        for (round, records) in [180usize, 10_400, 320_000].into_iter().enumerate() {
            let memory: Vec<u8> = payload(records as u64, 40 * records);
            let layout = Layout::new(&particle, records as u64);
            send.send_typed(peer, &memory, &layout).unwrap().await.unwrap();
            soon("the message", arrived.reach(round as u64 + 1)).await;
            // The peer may be a round ahead.
            let out = got.lock().unwrap().remove(0);
            for record in 0..records {
                let (from, to) = (&memory[40 * record..][..40], &out[40 + 120 * record..]);
                assert_eq!(
                    (&from[..4], &from[8..33]),
                    (&to[..4], &to[8..33]),
                    "record {record} of {records}"
                );
                // What lies between the fields, and between the records, is not touched.
                assert!([&to[4..8], &to[33..120]].concat().iter().all(|byte| *byte == 0xee));
            }
            assert!(out[..40].iter().all(|byte| *byte == 0xee));
        }
        assert_eq!(job.stats().panics, 0);
        job.barrier().await.unwrap();
    });
}

/// What is wrong is told before any byte moves, wherever the memory is.
async fn refusals(job: Job) {
    let peer = Rank(1 - job.rank().0);
    let window = job.shmalloc::<u32>(100).await.unwrap();
    let (words, floats) = (Datatype::of::<u32>(), Datatype::of::<f32>());
    let (ten, eleven) = (Layout::new(&words, 10), Layout::new(&words, 11));
    let source = numbers(1, 10);
    for (to, from) in [(Layout::new(&floats, 10), ten), (eleven, ten), (ten, Layout::new(&floats, 10))] {
        let put = window.put_typed(peer, &to, &source, &from).await;
        assert!(matches!(put, Err(TypedError::Transfer(TransferError::Signature { .. }))), "{put:?}");
        let get = window.get_typed(peer, &to, source.clone(), &from).await;
        assert!(matches!(get, Err(TypedError::Transfer(TransferError::Signature { .. }))), "{get:?}");
    }
    for (to, from) in [(ten.at(361), ten), (ten, ten.at(1)), (eleven.at(400), eleven)] {
        let put = window.put_typed(peer, &to, &source, &from).await;
        assert!(matches!(put, Err(TypedError::Transfer(TransferError::OutOfBounds { .. }))), "{put:?}");
    }
    let unknown = window.put_typed(Rank(2), &ten, &source, &ten).await;
    assert_eq!(unknown, Err(RmaError::UnknownRank { rank: Rank(2), size: 2 }.into()));
    // A future that has given its result has no other one.
    let nothing = Layout::new(&words, 0);
    for (rank, layout) in [(Rank(2), &ten), (peer, &nothing)] {
        let mut put = std::pin::pin!(window.put_typed(rank, layout, &source, layout));
        assert_eq!(put.as_mut().await.is_ok(), rank == peer);
        let again = futures::poll!(put);
        assert!(matches!(again, std::task::Poll::Ready(Err(TypedError::Rma(_)))), "{again:?}");
    }
    job.barrier().await.unwrap();
    assert_eq!(window.to_vec(), [0; 100]);
    let other = window.clone();
    window.free().await.unwrap();
    let freed = other.put_typed(peer, &ten, &source, &ten).await;
    assert!(matches!(freed, Err(TypedError::Rma(RmaError::NoSuchWindow(_)))), "{freed:?}");
    let freed = other.get_typed(peer, &ten, source, &ten).await;
    assert!(matches!(freed, Err(TypedError::Rma(RmaError::NoSuchWindow(_)))), "{freed:?}");
    job.barrier().await.unwrap();
}

case!(error_layouts_that_are_not_in_a_region_move_nothing);
fn error_layouts_that_are_not_in_a_region_move_nothing() {
    for oversend in ["auto", "always"] {
        run(2, options().env("POSTHASTE_OVERSEND", oversend), async |job| {
            let peer = Rank(1 - job.rank().0);
            let region = job.region(400).await.unwrap();
            let table = job.region_from(vec![0_u8; 400]).unwrap();
            let keys = job.world().all_gather(&[region.key(), table.key()]).await.unwrap();
            let theirs = &keys[2 * peer.index()..][..2];
            let (words, floats) = (Datatype::of::<u32>(), Datatype::of::<f32>());
            let (ten, source) = (Layout::new(&words, 10), numbers(1, 10));
            for key in theirs {
                let remote = job.remote_region(*key).await.unwrap();
                for beyond in [ten.at(361), ten.at(400), ten.at(1 << 40)] {
                    let put = remote.put_typed(&beyond, &source, &ten).await;
                    assert!(
                        matches!(put, Err(TypedError::Transfer(TransferError::OutOfBounds { len: 400, .. }))),
                        "{put:?}"
                    );
                    let get = remote.get_typed(&beyond, source.clone(), &ten).await;
                    assert!(
                        matches!(get, Err(TypedError::Transfer(TransferError::OutOfBounds { len: 400, .. }))),
                        "{get:?}"
                    );
                }
                let put = remote.put_typed(&Layout::new(&floats, 10), &source, &ten).await;
                assert!(matches!(put, Err(TypedError::Transfer(TransferError::Signature { .. }))), "{put:?}");
            }
            // Of a key that says more than there is the owner is not taken in.
            let gone: TypedError = RmaError::Fault(posthaste::Fault::NoSuchMemory(peer)).into();
            let longer = job.remote_region(RegionKey { len: 8000, ..theirs[1] }).await.unwrap();
            assert_eq!(longer.put_typed(&ten, &source, &ten).await, Err(gone.clone()));
            job.barrier().await.unwrap();
            let mut own = vec![1; 400];
            region.read(0, &mut own).unwrap();
            assert_eq!((own, table.into_inner()), (vec![0; 400], vec![0; 400]));
            // Memory that its owner has taken back, and has other memory instead.
            let other = job.region_from(vec![0_u8; 400]).unwrap();
            job.barrier().await.unwrap();
            let remote = job.remote_region(theirs[1]).await.unwrap();
            assert_eq!(remote.put_typed(&ten, &source, &ten).await, Err(gone.clone()));
            assert_eq!(remote.get_typed(&ten, source, &ten).await, Err(gone));
            job.barrier().await.unwrap();
            assert_eq!(other.into_inner(), [0; 400]);
        });
    }
}

case!(puts_from_owned_memory_move_what_those_from_borrowed_memory_do);
/// Puts of owned memory beside those of borrowed memory: in several requests, from one run and from many, to layouts that are told
/// in a few instructions and in many.
fn puts_from_owned_memory_move_what_those_from_borrowed_memory_do() {
    for oversend in ["auto", "always"] {
        run(2, options().env("POSTHASTE_OVERSEND", oversend), async |job| {
            const LEN: u64 = 6 << 20;
            let window = job.shmalloc::<u8>(2 * LEN as usize).await.unwrap();
            let byte = Datatype::of::<u8>();
            let blocks = |count: u64, len: u64, stride: i64| byte.vector(count, len, stride).unwrap();
            let irregular: Vec<(i64, u64)> =
                (0..500).map(|at| (at * 700 + at * at % 97, 300 + at as u64)).collect();
            let many = byte.indexed(&irregular).unwrap();
            let cases = [
                (blocks(2560, 1024, 2048), byte.contiguous(2560 << 10).unwrap()),
                (blocks(90_000, 8, 24), byte.contiguous(720_000).unwrap()),
                (blocks(90_000, 8, 24), blocks(45_000, 16, 40)),
                (many.clone(), byte.contiguous(many.size()).unwrap()),
            ];
            if job.rank() == Rank(0) {
                for (number, (to, from)) in cases.iter().enumerate() {
                    let source = payload(number as u64, from.extent() as usize + 77);
                    let from = Layout::new(from, 1).at(33);
                    let here = Layout::new(to, 1).at(5);
                    soon("a put", window.put_typed(Rank(1), &here, &source, &from)).await.unwrap();
                    let (there, owned) = (here.at(LEN + 5), source.into());
                    soon("a put", window.put_typed_bytes(Rank(1), &there, owned, &from)).await.unwrap();
                    job.barrier().await.unwrap();
                    job.barrier().await.unwrap();
                }
            } else {
                for number in 0..cases.len() {
                    job.barrier().await.unwrap();
                    let all = window.to_vec();
                    let (borrowed, owned) = all.split_at(LEN as usize);
                    assert!(borrowed == owned, "case {number} {oversend}");
                    assert!(borrowed.iter().filter(|byte| **byte != 0).count() > 100_000);
                    window.store_slice(0, &vec![0; 2 * LEN as usize]).unwrap();
                    job.barrier().await.unwrap();
                }
            }
        });
    }
}

case!(error_layouts_that_do_not_match_move_nothing);
fn error_layouts_that_do_not_match_move_nothing() {
    run_as(here!(), 2, options(), async |job| {
        refusals(job.clone()).await;
    });
}

case!(error_layouts_that_do_not_match_move_nothing_over_sends);
fn error_layouts_that_do_not_match_move_nothing_over_sends() {
    run_as(here!(), 2, over_send(), async |job| {
        refusals(job.clone()).await;
    });
}

case!(error_a_layout_that_names_bytes_several_times_is_refused);
/// Whatever the way to the memory: what names more bytes than there are, and so some of them several times, is refused.
fn error_a_layout_that_names_bytes_several_times_is_refused() {
    run(2, options(), async |job| {
        let window = job.shmalloc::<u64>(1).await.unwrap();
        let again = Datatype::of::<u64>().hvector(100, 1, 0).unwrap();
        let (there, packed) = (Layout::new(&again, 1), Datatype::of::<u64>());
        let here = Layout::new(&packed, 100);
        job.barrier().await.unwrap();
        for rank in job.ranks() {
            let refused = TypedError::Transfer(TransferError::Overlapping { size: 800, len: 8 });
            assert_eq!(window.put_typed(rank, &there, &[7u64; 100], &here).await, Err(refused.clone()));
            assert_eq!(window.get_typed(rank, &there, vec![0u64; 100], &here).await.map(drop), Err(refused));
        }
        job.barrier().await.unwrap();
        assert_eq!(window.to_vec(), [0]);
    });
}
