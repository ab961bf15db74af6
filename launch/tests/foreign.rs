//! Which launcher's variables mean which place, and which mean none.

use std::collections::BTreeMap;
use std::time::Instant;

use posthaste_launch::{Appointment, Detected, Foreign, ForeignError, detect};
use proptest::prelude::*;

type Pair<'a> = (&'a str, &'a str);
type Pairs = &'static [Pair<'static>];

fn look(pairs: &[Pair]) -> Result<Option<Detected>, ForeignError> {
    let env: BTreeMap<&str, &str> = pairs.iter().copied().collect();
    detect(&|name| env.get(name).map(|value| value.to_string()))
}

fn launcher(pairs: &[Pair]) -> &'static str {
    look(pairs).unwrap().expect("a launcher").launcher()
}

/// What ranks are told that have to meet by themselves.
fn appointed(pairs: &[Pair]) -> Appointment {
    match look(pairs).unwrap().expect("a launcher").connect(Instant::now()).unwrap() {
        Foreign::Rendezvous(appointment) => appointment,
        other => panic!("{other:?}"),
    }
}

fn with<'a>(pairs: &[Pair<'a>], more: &[Pair<'a>]) -> Vec<Pair<'a>> {
    pairs.iter().chain(more).copied().collect()
}

fn without<'a>(pairs: &[Pair<'a>], name: &str) -> Vec<Pair<'a>> {
    pairs.iter().filter(|pair| pair.0 != name).copied().collect()
}

const OPEN_MPI: Pairs = &[
    ("PMIX_NAMESPACE", "727711745"),
    ("PMIX_RANK", "1"),
    ("PMIX_SERVER_URI41", "727711744.0;tcp4://127.0.0.1:52651"),
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
];
const SRUN_PMIX: Pairs = &[("PMIX_NAMESPACE", "slurm.pmix.4.0"), ("PMIX_RANK", "0")];
const HYDRA: Pairs = &[("PMI_FD", "8"), ("PMI_RANK", "3"), ("PMI_SIZE", "4")];
const HYDRA_PORT: Pairs = &[("PMI_PORT", "vm:37385"), ("PMI_ID", "3")];
const SRUN_PMI2: Pairs = &[("PMI_FD", "11"), ("PMI_RANK", "0"), ("PMI_SIZE", "1"), ("PMI_JOBID", "3.0")];
const SRUN: Pairs = &[
    ("SLURM_JOB_ID", "3"),
    ("SLURM_STEP_ID", "1"),
    ("SLURM_PROCID", "2"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_STEP_NUM_NODES", "2"),
    ("SLURM_STEP_NODELIST", "node[03-05,7],login"),
];
const BATCH: Pairs =
    &[("SLURM_JOB_ID", "5"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "3"), ("SLURM_JOB_NODELIST", "vm")];
const POD: Pairs = &[
    ("KUBERNETES_SERVICE_HOST", "10.96.0.1"),
    ("JOB_COMPLETION_INDEX", "2"),
    ("JOB_COMPLETIONS", "4"),
    ("HOSTNAME", "sort-2"),
    ("MASTER_ADDR", "sort-0.ranks"),
];
const TORCH: Pairs =
    &[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "10.0.0.4"), ("MASTER_PORT", "29500")];

/// What each form needs, and who it is.
const FORMS: &[(&str, Pairs, Pairs)] = &[
    ("Open MPI or another PMIx launcher", OPEN_MPI, &[("PMIX_NAMESPACE", ""), ("PMIX_RANK", "")]),
    ("MPICH or another PMI-1 launcher", HYDRA, &[("PMI_RANK", ""), ("PMI_SIZE", "")]),
    ("MPICH or another PMI-1 launcher", HYDRA_PORT, &[("PMI_ID", "")]),
    ("Slurm", SRUN, &[("SLURM_PROCID", ""), ("SLURM_STEP_NODELIST", ""), ("SLURM_JOB_ID", "")]),
    ("Kubernetes", POD, &[("JOB_COMPLETIONS", "")]),
    ("torchrun", TORCH, &[("RANK", ""), ("WORLD_SIZE", ""), ("MASTER_ADDR", ""), ("MASTER_PORT", "")]),
];

#[test]
fn every_form_is_known() {
    for (name, form, _) in FORMS {
        assert_eq!(launcher(form), *name);
    }
    assert_eq!(launcher(SRUN_PMIX), "Open MPI or another PMIx launcher");
    assert_eq!(launcher(SRUN_PMI2), "MPICH or another PMI-1 launcher");
}

#[test]
fn no_launcher_is_none() {
    for form in [
        &[][..],
        BATCH,
        &[("SLURM_JOB_ID", "5"), ("SLURM_NTASKS", "3")],
        // The shell of `salloc`, which is a step of its own.
        &[
            ("SLURM_JOB_ID", "5"),
            ("SLURM_STEP_ID", "4294967290"),
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "1"),
        ],
        &[("RANK", "general")],
        &[("RANK", "3")],
        &[("WORLD_SIZE", "3")],
        &[("MASTER_ADDR", "db"), ("MASTER_PORT", "1")],
        &[("PMI_RANK", "7")],
        &[("PMI_SIZE", "0")],
        &[("PMIX_MCA_gds", "hash"), ("OMPI_MCA_btl", "self"), ("SLURM_CONF", "/etc/slurm.conf")],
        &[("PMIX_RANK", ""), ("PMI_FD", ""), ("JOB_COMPLETION_INDEX", ""), ("SLURM_STEP_ID", "")],
        &[("RANK", "1"), ("WORLD_SIZE", "")],
        &[("TORCHELASTIC_RUN_ID", "none")],
    ] {
        assert!(look(form).unwrap().is_none(), "{form:?}");
    }
}

#[test]
fn what_is_missing_is_named() {
    for (name, form, needed) in FORMS {
        for (missing, _) in *needed {
            // Emptied is as good as unset.
            for form in [without(form, missing), with(&without(form, missing), &[(missing, "")])] {
                let error = look(&form).unwrap_err();
                assert!(matches!(error, ForeignError::Partial { .. }), "{form:?}: {error}");
                let text = error.to_string();
                assert!(text.starts_with(name) && text.contains(&format!("but {missing} is not")), "{text}");
                assert!(text.contains("to run without a job") || text.contains("without a job"), "{text}");
            }
        }
    }
    // A rank and a size, and nobody to talk to; unless somebody else knows.
    let doorless = &[("PMI_RANK", "1"), ("PMI_SIZE", "2")];
    assert!(look(doorless).unwrap_err().to_string().contains("but PMI_FD is not"));
    assert_eq!(launcher(&with(doorless, SRUN)), "Slurm");
    let error = look(&[("RANK", "1"), ("WORLD_SIZE", "2")]).unwrap_err().to_string();
    assert!(error.contains("RANK=1 is set but MASTER_ADDR is not"), "{error}");
}

#[test]
fn impossible_values_are_named() {
    let bad = ["-1", "+1", "x", "1 ", "1.0", "99999999999999999999999", "0x1", "²"];
    for (form, name) in [
        (OPEN_MPI, "PMIX_RANK"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (HYDRA, "PMI_FD"),
        (HYDRA, "PMI_RANK"),
        (HYDRA, "PMI_SIZE"),
        (HYDRA_PORT, "PMI_ID"),
        (SRUN, "SLURM_PROCID"),
        (SRUN, "SLURM_STEP_NUM_TASKS"),
        (SRUN, "SLURM_STEP_ID"),
        (SRUN, "SLURM_STEP_RESV_PORTS"),
        (POD, "JOB_COMPLETION_INDEX"),
        (POD, "JOB_COMPLETIONS"),
        (TORCH, "RANK"),
        (TORCH, "WORLD_SIZE"),
        (TORCH, "MASTER_PORT"),
    ] {
        for value in bad {
            let error = look(&with(&without(form, name), &[(name, value)])).unwrap_err();
            assert!(matches!(error, ForeignError::Invalid { .. }), "{name}={value}: {error}");
            assert!(error.to_string().contains(name), "{error}");
        }
    }
    for (form, name, value) in [
        (HYDRA, "PMI_FD", "2"),
        (HYDRA, "PMI_SIZE", "4097"),
        (HYDRA_PORT, "PMI_PORT", "vm"),
        (HYDRA_PORT, "PMI_PORT", "vm:0"),
        (HYDRA_PORT, "PMI_PORT", "::1:7"),
        (TORCH, "WORLD_SIZE", "0"),
        (TORCH, "MASTER_PORT", "65535"),
        (TORCH, "MASTER_PORT", "0"),
        (TORCH, "MASTER_ADDR", "a host"),
        (TORCH, "POSTHASTE_RENDEZVOUS", "host"),
        (SRUN, "SLURM_STEP_NODELIST", "node[3-"),
        (SRUN, "SLURM_STEP_RESV_PORTS", "70000"),
    ] {
        let error = look(&with(&without(form, name), &[(name, value)])).unwrap_err();
        assert!(matches!(error, ForeignError::Invalid { .. }), "{name}={value}: {error}");
    }
    // What is shown is short and harmless.
    let long = format!("\x1b[2J{}", "9".repeat(10_000));
    let text = look(&with(&without(TORCH, "RANK"), &[("RANK", &long)])).unwrap_err().to_string();
    assert!(text.len() < 300 && !text.contains('\x1b'), "{text}");
}

#[test]
fn a_rank_over_the_size_is_refused() {
    for (form, rank) in [
        (OPEN_MPI, "PMIX_RANK"),
        (HYDRA, "PMI_RANK"),
        (SRUN, "SLURM_PROCID"),
        (POD, "JOB_COMPLETION_INDEX"),
        (TORCH, "RANK"),
    ] {
        for value in ["4", "4294967295"] {
            let form = with(&without(&without(form, rank), "OMPI_COMM_WORLD_RANK"), &[(rank, value)]);
            let error = look(&form).unwrap_err();
            assert!(matches!(error, ForeignError::RankOutOfRange { .. }), "{rank}={value}: {error}");
            assert!(error.to_string().contains(rank), "{error}");
        }
    }
}

#[test]
fn the_order_is_kept() {
    // What a part of the environment says is not looked at once an earlier launcher is known.
    let all: Vec<_> = [SRUN, POD, &[("RANK", "2"), ("WORLD_SIZE", "4")]].concat();
    assert_eq!(launcher(&with(OPEN_MPI, &all)), "Open MPI or another PMIx launcher");
    assert_eq!(launcher(&with(HYDRA, &all)), "MPICH or another PMI-1 launcher");
    assert_eq!(launcher(&all), "Slurm");
    assert_eq!(launcher(&with(POD, TORCH_AS_POD)), "Kubernetes");
    assert_eq!(launcher(&with(BATCH, TORCH)), "torchrun");
    assert_eq!(launcher(&with(BATCH, OPEN_MPI)), "Open MPI or another PMIx launcher");
}

const TORCH_AS_POD: Pairs = &[("RANK", "2"), ("WORLD_SIZE", "4"), ("MASTER_PORT", "1")];

#[test]
fn two_launchers_at_once_are_told_apart_or_refused() {
    // Nothing says which of these is inside of the other, even where their numbers are the same.
    let same = &[("PMI_FD", "8"), ("PMI_RANK", "1"), ("PMI_SIZE", "4")];
    for both in [with(OPEN_MPI, HYDRA), with(OPEN_MPI, same), with(OPEN_MPI, HYDRA_PORT)] {
        let error = look(&both).unwrap_err();
        assert!(matches!(error, ForeignError::Contradiction { .. }), "{error}");
        assert!(error.to_string().contains("the PMIX_ variables say rank 1 of 4"), "{error}");
    }
    assert!(matches!(look(&with(SRUN_PMIX, SRUN_PMI2)), Err(ForeignError::Contradiction { .. })));
    // Slurm starts the others, and on many clusters each part of them.
    assert_eq!(launcher(&with(SRUN_PMIX, HYDRA)), "MPICH or another PMI-1 launcher");
    assert_eq!(launcher(&with(SRUN_PMI2, OPEN_MPI)), "Open MPI or another PMIx launcher");

    let other_rank = with(&without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), &[("OMPI_COMM_WORLD_RANK", "2")]);
    assert!(matches!(look(&other_rank), Err(ForeignError::Contradiction { .. })));

    for launched in [SRUN, POD] {
        for differs in [("RANK", "1"), ("WORLD_SIZE", "8")] {
            let torch = [("RANK", "2"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1")];
            assert_ne!(launcher(&with(launched, &torch)), "torchrun");
            let differs = with(&without(&torch, differs.0), &[differs]);
            let error = look(&with(launched, &differs)).unwrap_err();
            assert!(matches!(error, ForeignError::Contradiction { .. }), "{error}");
            // The agent, one per node, is started by the other launcher.
            let worker = with(&with(launched, &differs), &[("TORCHELASTIC_RUN_ID", "none")]);
            assert_eq!(launcher(&worker), "torchrun");
        }
    }
}

#[test]
fn ranks_meet_where_the_launcher_lets_them() {
    let place = |pairs: &[Pair]| appointed(pairs).place;
    let at = appointed(SRUN);
    assert_eq!((at.launcher, at.rank, at.size, at.serve), ("Slurm", 2, 4, false));
    assert_eq!(at.place, "node03:15049");
    assert!(appointed(&with(&without(SRUN, "SLURM_PROCID"), &[("SLURM_PROCID", "0")])).serve);
    assert_eq!(place(&with(SRUN, &[("SLURM_STEP_RESV_PORTS", "12004-12007")])), "node03:12004");
    let one_node = with(&without(SRUN, "SLURM_STEP_NUM_NODES"), &[("SLURM_STEP_NUM_NODES", "1")]);
    assert_eq!(place(&one_node), "127.0.0.1:15049");
    let old = without(SRUN, "SLURM_STEP_NUM_TASKS");
    assert_eq!(appointed(&old).size, 4);
    let arbitrary = with(SRUN, &[("SLURM_DISTRIBUTION", "arbitrary")]);
    let error = look(&arbitrary).unwrap_err();
    assert!(matches!(error, ForeignError::NoPlace { .. }), "{error}");
    let moved = with(&arbitrary, &[("POSTHASTE_RENDEZVOUS", "node05:7000")]);
    assert_eq!(place(&moved), "node05:7000");

    assert_eq!(place(TORCH), "10.0.0.4:29501");
    assert_eq!(
        place(&with(&without(TORCH, "MASTER_ADDR"), &[("MASTER_ADDR", "fd00::2")])),
        "[fd00::2]:29501"
    );
    assert_eq!(place(&with(TORCH, &[("POSTHASTE_RENDEZVOUS", "[::1]:9")])), "[::1]:9");

    assert_eq!(place(POD), "sort-0.ranks:17717");
    assert_eq!(place(&with(POD, &[("MASTER_PORT", "29500")])), "sort-0.ranks:29501");
    let by_world = with(&without(POD, "JOB_COMPLETIONS"), &[("WORLD_SIZE", "3")]);
    assert_eq!(appointed(&by_world).size, 3);
    let alone = [("JOB_COMPLETION_INDEX", "0"), ("JOB_COMPLETIONS", "1")];
    assert_eq!((place(&alone), appointed(&alone).serve), ("127.0.0.1:17717".into(), true));
}

#[test]
fn a_pod_that_cannot_name_rank_0_says_so() {
    let unnamed = without(POD, "MASTER_ADDR");
    assert!(look(&without(&unnamed, "HOSTNAME")).unwrap_err().to_string().contains("HOSTNAME is not"));
    for hostname in ["sort", "sort-3", "sort-02", "-2", "a b-2", "sort-2.ranks"] {
        let error = look(&with(&without(&unnamed, "HOSTNAME"), &[("HOSTNAME", hostname)])).unwrap_err();
        assert!(matches!(error, ForeignError::NoPlace { .. }), "{error}");
        assert!(error.to_string().contains("set MASTER_ADDR"), "{error}");
    }
    // This machine is no pod, so its name is not in the hosts file.
    let error = look(&unnamed).unwrap().unwrap().connect(Instant::now()).unwrap_err();
    assert!(error.to_string().contains("sort-2 has no full name in /etc/hosts"), "{error}");
}

/// The variables that are looked at, with what they are most likely to hold.
const NAMES: [&str; 33] = [
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_FD",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_PORT",
    "PMI_ID",
    "PMI_JOBID",
    "SLURM_STEP_ID",
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_RESV_PORTS",
    "SLURM_DISTRIBUTION",
    "JOB_COMPLETION_INDEX",
    "JOB_COMPLETIONS",
    "HOSTNAME",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "POSTHASTE_RENDEZVOUS",
    "LOCAL_RANK",
    "SLURM_NODELIST",
    "PMIX_ID",
    "MPI_LOCALNRANKS",
    "KUBERNETES_SERVICE_HOST",
];

fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => (0u32..6).prop_map(|number| number.to_string()),
        1 => Just("node[1-3]".to_owned()),
        1 => Just("host:8000".to_owned()),
        1 => Just("sort-1".to_owned()),
        1 => any::<u64>().prop_map(|number| number.to_string()),
        1 => "[ -~é]{0,12}",
        1 => any::<String>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever the environment holds, the answer is an error, or none without any sign of a launcher, or a rank
    /// below a size that a job can have.
    #[test]
    fn any_environment_has_a_sensible_answer(
        env in proptest::collection::btree_map(proptest::sample::select(NAMES.to_vec()), value(), 0..12)
    ) {
        let is_set = |name: &str| env.get(name).is_some_and(|value| !value.is_empty());
        match detect(&|name| env.get(name).cloned()) {
            Err(error) => prop_assert!(error.to_string().len() < 1200, "{}", error),
            Ok(None) => {
                for sign in [
                    "PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_FD", "PMI_PORT", "SLURM_STEP_ID",
                    "JOB_COMPLETION_INDEX",
                ] {
                    prop_assert!(!is_set(sign), "{}", sign);
                }
                prop_assert!(!is_set("RANK") || !is_set("WORLD_SIZE"));
            }
            Ok(Some(detected)) => {
                let launcher = detected.launcher();
                // Only those that need no network are asked where.
                if ["Slurm", "torchrun"].contains(&launcher)
                    && let Ok(Foreign::Rendezvous(at)) = detected.connect(Instant::now())
                {
                    prop_assert!(at.rank < at.size && at.size <= 4096);
                    prop_assert_eq!(at.serve, at.rank == 0);
                    let (host, port) = at.place.rsplit_once(':').unwrap();
                    prop_assert!(!host.is_empty() && port.parse::<u16>().unwrap() > 0);
                }
            }
        }
    }

    #[test]
    fn torchruns_numbers_come_through(size in 1u32..=4096, rank in 0u32..4096, port in 1u16..65535) {
        let (size_text, rank_text, port_text) = (size.to_string(), rank.to_string(), port.to_string());
        let found = look(&[
            ("RANK", &rank_text), ("WORLD_SIZE", &size_text), ("MASTER_ADDR", "h"), ("MASTER_PORT", &port_text),
        ]);
        match found {
            Ok(found) => match found.unwrap().connect(Instant::now()).unwrap() {
                Foreign::Rendezvous(at) => {
                    prop_assert_eq!((at.rank, at.size), (rank, size));
                    prop_assert!(rank < size);
                    prop_assert_eq!(at.place, format!("h:{}", port + 1));
                }
                other => prop_assert!(false, "{:?}", other),
            },
            Err(error) => prop_assert!(rank >= size, "{}", error),
        }
    }

    #[test]
    fn slurms_ports_stay_in_their_range(job in any::<u32>(), step in 0u32..100_000) {
        let (job, step) = (job.to_string(), step.to_string());
        let form = with(&without(&without(SRUN, "SLURM_JOB_ID"), "SLURM_STEP_ID"), &[
            ("SLURM_JOB_ID", &job), ("SLURM_STEP_ID", &step),
        ]);
        let place = appointed(&form).place;
        let port: u16 = place.strip_prefix("node03:").unwrap().parse().unwrap();
        prop_assert!((15_000..30_000).contains(&port), "{}", port);
    }
}
