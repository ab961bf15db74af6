use super::process::{Mapping, Peer};
use super::*;
use std::sync::Mutex;

/// One limit at a time: each wants two cores for itself.
static ALONE: Mutex<()> = Mutex::new(());

/// Two cores this process may use, or none on a machine with only one.
fn cores() -> Option<[usize; 2]> {
    let set = rustix::thread::sched_getaffinity(None).expect("affinity");
    let mut allowed = (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core));
    Some([allowed.next()?, allowed.next()?])
}

/// Runs a limit for a moment. That the data is right is part of every `run`: it fails with `WrongData`.
fn figure(name: &str, size: usize, unit: &str) {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let Some(cores) = cores() else { return };
    let args = LimitArgs { size, count: 1000, seconds: 0.05, cores };
    let measured = run(name, &args).expect(name);
    assert!(measured.value.is_finite() && measured.value > 0.0, "{name}: {measured:?}");
    assert_eq!(measured.unit, unit);
    assert!(NAMES.contains(&name));
}

#[test]
fn pingpong_two_lines() {
    figure("pingpong_two_lines", 8, "us");
}

#[test]
fn two_copy_pipeline() {
    for size in [4096, 12288, 200 << 10, 1 << 20] {
        figure("two_copy_pipeline", size, "GB/s");
    }
}

#[test]
fn memcpy_to_shared() {
    for size in [64, 4096, 1 << 20] {
        figure("memcpy_to_shared", size, "GB/s");
    }
}

#[test]
fn memcpy_from_shared() {
    for size in [64, 4096, 1 << 20] {
        figure("memcpy_from_shared", size, "GB/s");
    }
}

#[test]
fn tcp() {
    figure("tcp_pingpong", 8, "us");
    figure("tcp_stream", 64 << 10, "GB/s");
    figure("tcp_stream", 8, "GB/s");
    figure("tcp_aead_stream", 1 << 20, "GB/s");
}

#[test]
fn descriptor_loop() {
    for size in [8, 1024] {
        figure("descriptor_loop", size, "us");
    }
}

#[test]
fn lanes() {
    for size in [8, 2048, 64 << 10] {
        let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
        let Some(cores) = cores() else { return };
        let args = LimitArgs { size, count: 7, seconds: 0.05, cores };
        let measured = run("lanes", &args).expect("lanes");
        assert!(measured.value > 0.0 && measured.unit == "us", "{measured:?}");
    }
}

#[test]
fn blocks() {
    for size in [8, 24, 64, 1024] {
        figure("strided_copy", size, "GB/s");
        figure("layout_strided", size, "GB/s");
    }
    figure("layout_irregular", 8, "GB/s");
    figure("layout_transpose", 8, "GB/s");
    figure("vector_add", 1 << 20, "GB/s");
}

#[test]
fn atomics() {
    figure("contended_add", 8, "us");
    figure("bare_updates", 1 << 16, "M/s");
}

#[test]
fn irregular_blocks_are_in_order_and_apart() {
    let blocks = irregular(1000);
    assert_eq!(blocks.len(), 1000);
    assert!(blocks.iter().all(|(_, len)| (1..=8).contains(len)));
    assert!(blocks.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0));
    assert_eq!(blocks[..500], irregular(500));
}

#[test]
fn eventfd_asyncfd_wake() {
    figure("eventfd_asyncfd_wake", 8, "us");
}

#[test]
fn ticker_alone() {
    figure("ticker_alone", 8, "us");
}

#[test]
fn arguments_are_checked() {
    let args = LimitArgs { size: 4096, count: 1, seconds: 0.05, cores: [0, 1] };
    assert_eq!(run("speed", &args), Err(LimitError::Unknown("speed".into())));
    let refused = |name, args| assert!(matches!(run(name, &args), Err(LimitError::Argument(_))), "{name}");
    refused("ticker_alone", LimitArgs { seconds: 0.0, ..args.clone() });
    refused("ticker_alone", LimitArgs { seconds: f64::NAN, ..args.clone() });
    refused("ticker_alone", LimitArgs { cores: [1, 1], ..args.clone() });
    refused("ticker_alone", LimitArgs { cores: [usize::MAX, 1], ..args.clone() });
    refused("two_copy_pipeline", LimitArgs { size: 0, ..args.clone() });
    refused("two_copy_pipeline", LimitArgs { size: 4097, ..args.clone() });
    refused("memcpy_to_shared", LimitArgs { size: 100, ..args.clone() });
    refused("descriptor_loop", LimitArgs { size: 9, ..args.clone() });
    refused("lanes", LimitArgs { size: 9, ..args.clone() });
    refused("lanes", LimitArgs { count: 0, ..args.clone() });
    refused("strided_copy", LimitArgs { size: 12, ..args.clone() });
    refused("strided_copy", LimitArgs { count: usize::MAX, ..args.clone() });
    refused("layout_irregular", LimitArgs { count: 0, ..args.clone() });
    refused("bare_updates", LimitArgs { size: 24, ..args.clone() });
    refused("vector_add", LimitArgs { size: 0, ..args.clone() });
    refused("descriptor_loop", LimitArgs { size: 64, count: usize::MAX, ..args.clone() });
}

/// Neither a dead nor a stuck second process keeps the first one waiting.
#[test]
fn a_second_process_that_fails_ends_the_wait() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let Some(cores) = cores() else { return };
    let _affinity = process::RestoreAffinity::save().expect("affinity");
    let memory = Mapping::shared(4096).expect("memory");
    let never = || memory.line(0).load(std::sync::atomic::Ordering::Acquire) == 1;

    let dead = Peer::start(cores, 0.05, |_| Ok(())).expect("fork");
    assert_eq!(dead.watch().spin(never), Err(LimitError::PeerDied));
    assert_eq!(dead.finish(), Ok(()));

    let wrong = Peer::start(cores, 0.05, |_| Err(LimitError::WrongData)).expect("fork");
    assert_eq!(wrong.finish(), Err(LimitError::PeerDied));

    let stuck = Peer::start_within(cores, 50_000_000, |_| {
        std::thread::sleep(std::time::Duration::from_secs(60));
        Ok(())
    })
    .expect("fork");
    let begin = std::time::Instant::now();
    assert_eq!(stuck.watch().spin(never), Err(LimitError::TimedOut));
    drop(stuck);
    assert!(begin.elapsed().as_secs() < 30);
}

#[test]
fn quantiles() {
    let mut figures = [3.0, 1.0, 2.0, 4.0];
    assert_eq!(median(&mut figures), 2.0);
    assert_eq!(quantile(&mut figures, 0.99), 4.0);
    assert_eq!(quantile(&mut figures, 0.0), 1.0);
    assert!(median(&mut []).is_nan());
}
