//! What there is to measure, with what limit and bar.

use super::Device;
use posthaste_launch::MAX_RANKS;

/// A benchmark: what it is called, measured with, compared to, and asked for.
#[derive(Debug)]
pub struct Bench {
    pub name: &'static str,
    pub sizes: &'static [usize],
    pub unit: &'static str,
    pub higher_is_better: bool,
    pub limit: Option<Limit>,
    pub bar: Option<f64>,
    /// Whether the owned context and the other runtime are measured too.
    pub faces: bool,
    /// Numbers of ranks, each of which gives a row.
    pub ranks: &'static [u32],
    pub device: Device,
    /// Operations of a batch, or blocks of a layout.
    pub count: usize,
    /// What its ranks run, where that is called otherwise.
    pub program: Option<&'static str>,
    /// What its ranks are told besides.
    pub env: &'static [(&'static str, &'static str)],
}

/// What a benchmark is measured beside.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// A loop without the library, and the factor from its figure to the benchmark's.
    Bare(&'static str, f64),
    /// The same benchmark without what its ranks are told besides.
    Native,
    /// The start and the end of as many processes that do nothing.
    Started,
    /// What another program comes to that does the same by other means.
    Instead(&'static str),
}

impl Limit {
    /// What the report calls it.
    pub fn name(self) -> &'static str {
        match self {
            Limit::Bare(name, _) | Limit::Instead(name) => name,
            Limit::Native => "native",
            Limit::Started => "started",
        }
    }
}

const K: usize = 1024;
const M: usize = 1024 * K;

const fn bench(name: &'static str, sizes: &'static [usize], unit: &'static str) -> Bench {
    Bench {
        name,
        sizes,
        unit,
        higher_is_better: false,
        limit: None,
        bar: None,
        faces: true,
        ranks: &[2],
        device: Device::Shm,
        count: 1000,
        program: None,
        env: &[],
    }
}

const fn fast(name: &'static str, sizes: &'static [usize], unit: &'static str) -> Bench {
    Bench { higher_is_better: true, ..bench(name, sizes, unit) }
}

const fn tcp(bench: Bench) -> Bench {
    Bench { device: Device::Tcp, ..bench }
}

/// Only through the handle on a current-thread runtime.
const fn plain(bench: Bench) -> Bench {
    Bench { faces: false, ..bench }
}

const fn against(name: &'static str, bar: f64, bench: Bench) -> Bench {
    Bench { limit: Some(Limit::Bare(name, 1.0)), bar: Some(bar), ..bench }
}

const fn beside(name: &'static str, bench: Bench) -> Bench {
    Bench { limit: Some(Limit::Bare(name, 1.0)), ..bench }
}

const fn twice(name: &'static str, bar: f64, bench: Bench) -> Bench {
    Bench { limit: Some(Limit::Bare(name, 2.0)), bar: Some(bar), ..bench }
}

const fn instead_of(name: &'static str, bench: Bench) -> Bench {
    Bench { limit: Some(Limit::Instead(name)), ..bench }
}

const fn at_best(bar: f64, bench: Bench) -> Bench {
    Bench { bar: Some(bar), ..bench }
}

const fn runs(program: &'static str, bench: Bench) -> Bench {
    Bench { program: Some(program), ..bench }
}

const fn counting(count: usize, bench: Bench) -> Bench {
    Bench { count, ..bench }
}

const fn ranks(ranks: &'static [u32], bench: Bench) -> Bench {
    Bench { ranks, ..bench }
}

/// Puts and gets over sends, though the device could do better.
const fn over_send(bench: Bench) -> Bench {
    Bench { limit: Some(Limit::Native), env: &[("POSTHASTE_OVERSEND", "always")], ..plain(bench) }
}

/// Every message asks for its place and goes straight there, where a long one would as a rule be copied in and out.
const RENDEZVOUS: &[(&str, &str)] = &[("POSTHASTE_RENDEZVOUS_BYTES", "1M")];
const ENCRYPTED: &[(&str, &str)] = &[("POSTHASTE_TCP_MODE", "encrypted")];
/// More ranks than cores.
const CROWDS: &[u32] = &[4, 8, 16];

/// Whose ranks send a word, or count something.
const OF_ONE_SIZE: &[&str] = &[
    "call_latency",
    "call_typed_latency",
    "calls_joined",
    "am_rate",
    "am_rate_awaited",
    "put_latency",
    "put_rate",
    "get_rate",
    "barrier",
    "layout_irregular",
    "layout_transpose",
    "fetch_add",
    "put_signal",
    "wakeup_latency",
    "idle_cpu",
    "memory_silent",
    "memory_talking",
    "loss",
    "loss_busy",
    "oversend_put_rate",
    "oversend_get_rate",
    "join",
];

/// Of which one operation has all other ranks as its targets.
const TO_ALL_OTHERS: &[&str] = &["multicast", "many_to_many"];

/// All benchmarks, in the order of the report. A name that is there twice is measured in several ways.
#[rustfmt::skip]
pub const BENCHES: &[Bench] = &[
    against("pingpong_two_lines", 1.35, bench("am_latency", &[8], "us")),
    twice("pingpong_two_lines", 1.5, bench("call_latency", &[8], "us")),
    Bench { limit: Some(Limit::Bare("pingpong_two_lines", 2.0)), ..bench("call_typed_latency", &[8], "us") },
    instead_of("call_latency", counting(64, plain(bench("calls_joined", &[8], "us")))),
    at_best(25.0, fast("am_rate", &[8], "M/s")),
    at_best(15.0, fast("am_rate_awaited", &[8], "M/s")),
    against("two_copy_pipeline", 0.95, fast("am_bandwidth", &[4 * K, 64 * K, M, 4 * M], "GB/s")),
    against("pingpong_two_lines", 4.0, bench("loan_latency", &[M], "us")),
    against("pingpong_two_lines", 1.2, bench("put_latency", &[8], "us")),
    at_best(60.0, fast("put_rate", &[8], "M/s")),
    at_best(60.0, fast("get_rate", &[8], "M/s")),
    against("memcpy_to_shared", 0.95, fast("put_bandwidth", &[4 * K, 64 * K, M, 16 * M], "GB/s")),
    against("memcpy_from_shared", 0.95, fast("get_bandwidth", &[4 * K, 64 * K, M, 16 * M], "GB/s")),
    against("descriptor_loop", 2.0, bench("replay", &[8, K], "us")),
    against("descriptor_loop", 2.0, counting(64, runs("replay", bench("replay_64", &[8, K], "us")))),
    beside("descriptor_loop", plain(bench("puts_awaited", &[8, K], "us"))),
    beside("descriptor_loop", counting(64, runs("puts_awaited", plain(bench("puts_awaited_64", &[8, K], "us"))))),
    beside("descriptor_loop", plain(bench("puts_joined", &[8, K], "us"))),
    beside("descriptor_loop", counting(64, runs("puts_joined", plain(bench("puts_joined_64", &[8, K], "us"))))),
    against("descriptor_loop", 2.0, plain(bench("replay_sends", &[8, K], "us"))),
    against("descriptor_loop", 2.0,
        counting(64, runs("replay_sends", plain(bench("replay_sends_64", &[8, K], "us"))))),
    beside("descriptor_loop", plain(bench("replay_sends_acked", &[8, K], "us"))),
    beside("descriptor_loop",
        counting(64, runs("replay_sends_acked", plain(bench("replay_sends_acked_64", &[8, K], "us"))))),
    beside("descriptor_loop", plain(bench("sends_awaited", &[8, K], "us"))),
    beside("descriptor_loop", counting(64, runs("sends_awaited", plain(bench("sends_awaited_64", &[8, K], "us"))))),
    beside("descriptor_loop", plain(bench("sends_joined", &[8, K], "us"))),
    beside("descriptor_loop", counting(64, runs("sends_joined", plain(bench("sends_joined_64", &[8, K], "us"))))),
    against("lanes", 2.0, ranks(&[8], bench("multicast", &[8], "us"))),
    against("lanes", 1.3, ranks(&[8], bench("multicast", &[64 * K], "us"))),
    against("lanes", 2.0, ranks(&[8], plain(bench("many_to_many", &[8], "us")))),
    against("pingpong_two_lines", 1.6, bench("barrier", &[0], "us")),
    ranks(CROWDS, plain(bench("barrier", &[0], "us"))),
    against("pingpong_two_lines", 1.8, bench("all_reduce", &[8], "us")),
    ranks(CROWDS, plain(bench("all_reduce", &[8, M], "us"))),
    ranks(&[2, 4, 8, 16], plain(bench("all_to_all", &[K], "us"))),
    beside("memcpy_to_shared", plain(fast("broadcast_bandwidth", &[M, 8 * M], "GB/s"))),
    beside("vector_add", plain(fast("all_reduce_bandwidth", &[M, 8 * M], "GB/s"))),
    against("strided_copy", 0.8, counting(1024, plain(fast("strided_put", &[8, 64, K], "GB/s")))),
    at_best(1.5, instead_of("strided_packed", counting(1024,
        runs("strided_put", plain(fast("strided_put_or_pack", &[8, 64, K], "GB/s")))))),
    at_best(1.5, instead_of("strided_both_packed", counting(1024,
        runs("strided_both", plain(fast("strided_both_or_pack", &[8, 64, K], "GB/s")))))),
    against("layout_strided", 0.6, counting(1024, ranks(&[1], plain(fast("layout_strided", &[8, 64, K], "GB/s"))))),
    against("layout_irregular", 0.6, counting(1024, ranks(&[1], plain(fast("layout_irregular", &[8], "GB/s"))))),
    against("layout_transpose", 0.6, ranks(&[1], plain(fast("layout_transpose", &[8], "GB/s")))),
    instead_of("typed_staged", plain(fast("typed_direct", &[8, 64, 512, 4 * K, 64 * K], "GB/s"))),
    against("contended_add", 2.0, plain(bench("fetch_add", &[8], "us"))),
    against("bare_updates", 0.5, plain(fast("gups", &[2 * M], "M/s"))),
    against("pingpong_two_lines", 1.5, bench("put_signal", &[8], "us")),
    against("eventfd_asyncfd_wake", 1.25, bench("wakeup_latency", &[8], "us")),
    beside("ticker_alone", plain(bench("neighbour_delay", &[1, 1000], "us"))),
    at_best(1.0, ranks(&[8], plain(bench("idle_cpu", &[0], "%")))),
    ranks(&[16], plain(bench("oversubscribed", &[64], "s"))),
    at_best(1.0, ranks(&[33], plain(bench("memory_silent", &[0], "KiB")))),
    at_best(64.0, ranks(&[33], plain(bench("memory_talking", &[0], "KiB")))),
    at_best(50.0, ranks(&[101], plain(bench("loss", &[0], "ms")))),
    at_best(50.0, ranks(&[101], plain(bench("loss_busy", &[0], "ms")))),
    Bench { env: RENDEZVOUS, ..against("two_copy_pipeline", 1.0,
        plain(fast("long_bandwidth", &[M, 4 * M, 16 * M, 64 * M], "GB/s"))) },
    over_send(runs("put_rate", fast("oversend_put_rate", &[8], "M/s"))),
    over_send(runs("get_rate", fast("oversend_get_rate", &[8], "M/s"))),
    over_send(runs("put_bandwidth", fast("oversend_put_bandwidth", &[64 * K, M], "GB/s"))),
    over_send(runs("get_bandwidth", fast("oversend_get_bandwidth", &[64 * K, M], "GB/s"))),
    Bench { limit: Some(Limit::Started), ..ranks(&[64], plain(bench("join", &[0], "s"))) },

    tcp(against("tcp_pingpong", 1.0, bench("am_latency", &[8], "us"))),
    tcp(twice("tcp_pingpong", 1.1, bench("call_latency", &[8], "us"))),
    tcp(instead_of("call_latency", counting(64, plain(bench("calls_joined", &[8], "us"))))),
    tcp(at_best(4.0, fast("am_rate", &[8], "M/s"))),
    tcp(against("tcp_stream", 0.95, fast("am_bandwidth", &[64 * K, M, 4 * M], "GB/s"))),
    tcp(against("tcp_stream", 0.95, fast("put_bandwidth", &[64 * K, M, 4 * M], "GB/s"))),
    tcp(against("tcp_stream", 0.95, fast("get_bandwidth", &[64 * K, M, 4 * M], "GB/s"))),
    tcp(Bench { env: ENCRYPTED,
        ..against("tcp_aead_stream", 0.9, runs("am_bandwidth", fast("encrypted_am_bandwidth", &[M], "GB/s"))) }),
    tcp(at_best(0.667, instead_of("puts_joined", bench("replay", &[8, K], "us")))),
    tcp(at_best(0.667, instead_of("puts_joined", counting(64, runs("replay", bench("replay_64", &[8, K], "us")))))),
    tcp(at_best(0.667, instead_of("sends_joined", plain(bench("replay_sends_acked", &[8, K], "us"))))),
    tcp(at_best(0.667, instead_of("sends_joined",
        counting(64, runs("replay_sends_acked", plain(bench("replay_sends_acked_64", &[8, K], "us"))))))),
    tcp(at_best(0.8, instead_of("put_bandwidth", plain(fast("typed_put_bandwidth", &[M], "GB/s"))))),
    tcp(Bench { limit: Some(Limit::Bare("tcp_pingpong", 2.0)), ..plain(bench("fetch_add", &[8], "us")) }),
    tcp(plain(fast("gups", &[2 * M], "M/s"))),
    tcp(beside("tcp_pingpong", plain(bench("put_signal", &[8], "us")))),
    tcp(ranks(&[8], plain(bench("multicast", &[8, 64 * K], "us")))),
    tcp(beside("tcp_pingpong", plain(bench("barrier", &[0], "us")))),
    tcp(ranks(CROWDS, plain(bench("barrier", &[0], "us")))),
    tcp(beside("tcp_pingpong", plain(bench("all_reduce", &[8], "us")))),
    tcp(ranks(CROWDS, plain(bench("all_reduce", &[8, M], "us")))),
    tcp(ranks(&[2, 4, 8, 16], plain(bench("all_to_all", &[K], "us")))),
    tcp(beside("tcp_stream", plain(fast("broadcast_bandwidth", &[M, 8 * M], "GB/s")))),
    tcp(beside("tcp_stream", plain(fast("all_reduce_bandwidth", &[M, 8 * M], "GB/s")))),
    tcp(at_best(1.0, ranks(&[8], plain(bench("idle_cpu", &[0], "%"))))),
    tcp(at_best(100.0, ranks(&[33], plain(bench("loss", &[0], "ms"))))),
    tcp(at_best(100.0, ranks(&[33], plain(bench("loss_busy", &[0], "ms"))))),
];

/// What a size has to be.
#[derive(Clone, Copy, Debug)]
enum Sizes {
    /// Whatever it counts.
    All,
    /// So many bytes at least.
    From(usize),
    /// A multiple of so many bytes, which is not 0.
    MultipleOf(usize),
    /// A power of two within these bounds, both of which are in.
    PowerOfTwo(usize, usize),
}

impl Sizes {
    /// Of what ranks run.
    fn of(program: &str) -> Sizes {
        match program {
            "am_bandwidth" | "long_bandwidth" | "broadcast_bandwidth" | "put_bandwidth" | "get_bandwidth" => {
                Sizes::From(1)
            }
            "replay" | "puts_awaited" | "puts_joined" => Sizes::From(1),
            "replay_sends" | "replay_sends_acked" | "sends_awaited" | "sends_joined" => Sizes::From(1),
            "strided_put" | "strided_both" | "layout_strided" => Sizes::From(1),
            // The first word says which message it is, or that it is the last one.
            "multicast" | "many_to_many" => Sizes::From(8),
            "loan_latency" | "all_reduce" | "all_reduce_bandwidth" => Sizes::MultipleOf(8),
            "all_to_all" => Sizes::MultipleOf(4),
            "typed_put_bandwidth" => Sizes::MultipleOf(K),
            // All blocks have 256 KiB, and each is two of the other side.
            "typed_direct" | "typed_staged" => Sizes::PowerOfTwo(2, 256 * K),
            "gups" => Sizes::PowerOfTwo(8, 1 << 40),
            _ => Sizes::All,
        }
    }

    fn include(self, size: usize) -> bool {
        match self {
            Sizes::All => true,
            Sizes::From(least) => size >= least,
            Sizes::MultipleOf(unit) => size > 0 && size.is_multiple_of(unit),
            Sizes::PowerOfTwo(least, most) => size.is_power_of_two() && (least..=most).contains(&size),
        }
    }
}

impl std::fmt::Display for Sizes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Sizes::All => f.write_str("any size"),
            Sizes::From(1) => f.write_str("a byte at least"),
            Sizes::From(least) => write!(f, "{least} bytes at least"),
            Sizes::MultipleOf(unit) => write!(f, "a multiple of {unit} bytes"),
            Sizes::PowerOfTwo(least, most) => write!(f, "a power of two from {least} to {most} bytes"),
        }
    }
}

/// Whether ranks that run a program can do so with a size.
///
/// # Errors
/// If not: what it takes.
pub fn check_size(name: &str, program: &str, size: usize) -> Result<(), String> {
    let sizes = Sizes::of(program);
    if sizes.include(size) { Ok(()) } else { Err(format!("--sizes {size}: {name} takes {sizes}")) }
}

impl Bench {
    /// What its ranks run.
    pub fn program(&self) -> &'static str {
        self.program.unwrap_or(self.name)
    }

    /// Whether it can have a size.
    ///
    /// # Errors
    /// If not: what it takes.
    pub fn check_size(&self, size: usize) -> Result<(), String> {
        if self.is_of_one_size() && !self.sizes.contains(&size) {
            return Err(format!("--sizes: {} has none but {}", self.name, self.sizes[0]));
        }
        check_size(self.name, self.program(), size)
    }

    /// Whether it can have so many ranks.
    ///
    /// # Errors
    /// If not: how many it takes.
    pub fn check_ranks(&self, ranks: u32) -> Result<(), String> {
        let least = match self.name {
            // What one more peer costs is told by the difference to a job of two.
            "memory_silent" => 3,
            "multicast" | "many_to_many" | "loss" | "loss_busy" | "memory_talking" | "oversubscribed" => 2,
            _ => 1,
        };
        if (least..=MAX_RANKS).contains(&ranks) {
            return Ok(());
        }
        Err(format!("--ranks {ranks}: {} takes {least} to {MAX_RANKS}", self.name))
    }

    /// What its limit is measured with, beside so many ranks: operations of a batch, blocks, or targets.
    pub fn count(&self, ranks: u32) -> usize {
        if TO_ALL_OTHERS.contains(&self.name) { ranks as usize - 1 } else { self.count }
    }

    /// Whether it is told how many ranks to have: more than two, or as many as are asked for.
    pub fn takes_ranks(&self) -> bool {
        self.ranks.iter().any(|ranks| *ranks > 2)
    }

    /// Those of a device.
    pub fn of(device: Device) -> impl Iterator<Item = &'static Bench> {
        BENCHES.iter().filter(move |bench| bench.device == device)
    }

    /// Whether what its ranks are told besides leaves it what others do, too.
    pub fn has_counterparts(&self) -> bool {
        self.env.is_empty() || self.env == RENDEZVOUS
    }

    /// Whether its size is part of what it is.
    pub fn is_of_one_size(&self) -> bool {
        OF_ONE_SIZE.contains(&self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_a_multicast_has_as_many_lanes_as_there_are_targets() {
        for bench in BENCHES.iter().filter(|bench| TO_ALL_OTHERS.contains(&bench.name)) {
            assert_eq!((bench.count(2), bench.count(8)), (1, 7));
        }
        let replay = BENCHES.iter().find(|bench| bench.name == "replay_64").expect("it is there");
        assert_eq!((replay.count(2), replay.count(8)), (64, 64));
    }

    #[test]
    fn each_can_have_its_own_sizes_and_ranks() {
        for bench in BENCHES {
            for (size, ranks) in
                bench.sizes.iter().flat_map(|size| bench.ranks.iter().map(move |ranks| (size, ranks)))
            {
                assert_eq!(
                    (bench.check_size(*size), bench.check_ranks(*ranks)),
                    (Ok(()), Ok(())),
                    "{}",
                    bench.name
                );
            }
        }
    }
}
