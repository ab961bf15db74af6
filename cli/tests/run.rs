//! The command `posthaste run`, as a user types it.

use std::path::Path;
use std::process::{Command, Output};

const PROGRAM: &str = env!("CARGO_BIN_EXE_posthaste");

fn run(args: &[&str]) -> Output {
    Command::new(PROGRAM).arg("run").args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What ranks print, by rank.
fn labelled(args: &[&str], script: &str) -> Vec<String> {
    let out = run(&[args, &["--label", "--", "/bin/sh", "-c", script]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let mut lines: Vec<String> = text(&out.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn nodes_and_device_are_told_to_the_ranks() {
    let script = "echo $POSTHASTE_DEVICE/$POSTHASTE_NODES/${POSTHASTE_RENDEZVOUS%:*}";
    assert_eq!(labelled(&["-n", "2"], script), ["[0] //", "[1] //"]);
    assert_eq!(
        labelled(&["-n", "3", "--nodes", "2"], script),
        ["[0] /0x2:1/127.0.0.1", "[1] /0x2:1/127.0.0.1", "[2] /0x2:1/127.0.0.1"]
    );
    assert_eq!(labelled(&["-n", "1", "--device", "tcp"], script), ["[0] tcp//127.0.0.1"]);
    assert_eq!(labelled(&["-n", "1", "--device", "shm"], script), ["[0] shm//"]);
    assert_eq!(labelled(&["-n", "1", "--device", "auto"], script), ["[0] auto//"]);
}

#[test]
fn variables_are_set_for_all_ranks() {
    let script = "echo $GREETING/$EMPTY/${PATH:+path}";
    let given = ["-n", "2", "--env", "GREETING=a=b c", "--env", "EMPTY=", "--env", "PATH"];
    assert_eq!(labelled(&given, script), ["[0] a=b c//path", "[1] a=b c//path"]);
    for (given, told) in [
        ("=x", "names no variable"),
        ("POSTHASTE_DEVICE=tcp", "POSTHASTE_DEVICE=VALUE posthaste run"),
        ("NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE=VALUE gives it a value"),
    ] {
        let out = run(&["-n", "1", "--env", given, "--", "/bin/true"]);
        let said = text(&out.stderr);
        assert_eq!((out.status.code(), said.lines().count()), (Some(2), 1), "{said}");
        assert!(said.contains(told), "{said}");
    }
}

#[test]
fn a_job_shows_by_which_device_each_rank_reaches_each() {
    let job = ["-n", "4", "--nodes", "2", "--", PROGRAM, "info", "--job"];
    let out = run(&[&job[..], &["--json"]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let lines = text(&out.stdout);
    let ranks: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (near, far) = (["shm", "shm", "tcp", "tcp"], ["tcp", "tcp", "shm", "shm"]);
    assert_eq!(ranks.len(), 4, "{lines}");
    for (number, rank) in ranks.iter().enumerate() {
        assert_eq!(rank["rank"], number);
        assert_eq!(rank["node"], number / 2);
        assert_eq!(rank["devices"], serde_json::json!(if number < 2 { near } else { far }));
    }
    let table = run(&job);
    assert!(table.status.success(), "{}", text(&table.stderr));
    assert_eq!(text(&table.stdout).lines().filter(|line| line.contains("tcp")).count(), 4);
    // Outside of a job there is nothing to show.
    let alone = Command::new(PROGRAM).args(["info", "--job"]).output().unwrap();
    assert_eq!(alone.status.code(), Some(2));
    assert!(text(&alone.stderr).contains("posthaste run -n 4"), "{}", text(&alone.stderr));
}

#[test]
fn what_cannot_be_is_refused_before_anything_starts() {
    let dir = std::env::temp_dir();
    let hosts = dir.join(format!("posthaste-hosts-{}", std::process::id()));
    let several = dir.join(format!("posthaste-several-{}", std::process::id()));
    std::fs::write(&hosts, "alpha slots=two\n").unwrap();
    std::fs::write(&several, "localhost\n127.0.0.1\n").unwrap();
    let many = dir.join(format!("posthaste-many-{}", std::process::id()));
    std::fs::write(&many, "localhost slots=4000\n127.0.0.1 slots=4000\n").unwrap();
    let [hosts, several, many] = [&hosts, &several, &many].map(|path| path.to_str().unwrap());
    for (args, told) in [
        (&["-n", "4", "--nodes", "2", "--device", "shm"][..], "--device shm reaches no rank of another node"),
        (
            &["-n", "2", "--restart", "1", "--device", "shm"],
            "is reached over sockets: leave --device shm out, or --restart",
        ),
        (&["--hosts", several, "--device", "shm"], "leave out POSTHASTE_DEVICE (--device) or name `tcp`"),
        (&["-n", "4", "--nodes", "5"], "not over 5"),
        (&["-n", "4", "--device", "ib"], "possible values: auto, shm, tcp"),
        (&[], "--ranks"),
        (&["-n", "1", "--ssh", "x"], "--hosts"),
        (&["--hosts", "/nonexistent/list"], "/nonexistent/list cannot be read"),
        (&["--hosts", hosts], "line 1: `slots=two` is not understood"),
        (&["--hosts", hosts, "--nodes", "2"], "cannot be used with"),
        (&["--hosts", many], "a job has 1 to 4096 ranks, and the hosts of the list have 8000 slots"),
    ] {
        let out = run(&[args, &["--", "/bin/echo", "started"]].concat());
        let err = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {err}");
        assert!(err.contains(told) && out.stdout.is_empty(), "{args:?}: {err}");
    }
    std::fs::remove_file(hosts).unwrap();
    std::fs::remove_file(several).unwrap();
    std::fs::remove_file(many).unwrap();
}

#[test]
fn hosts_run_a_job_through_any_remote_shell() {
    let dir = std::env::temp_dir().join(format!("posthaste-run-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let (shell, list) = (dir.join("shell.sh"), dir.join("list"));
    std::fs::write(&shell, "echo \"Last login of $1\"; HOST=$1; export HOST; shift; exec \"$@\"\n").unwrap();
    std::fs::write(&list, "localhost slots=2\n127.0.0.1\n").unwrap();
    let show = |path: &Path| path.to_str().unwrap().to_owned();
    let (shell, agent, list) = (format!("sh {}", show(&shell)), format!("{PROGRAM} agent"), show(&list));
    let hosts = ["--hosts", &list, "--ssh", &shell, "--agent", &agent];
    let script = "echo $HOST $POSTHASTE_SIZE $POSTHASTE_NODES ${POSTHASTE_RENDEZVOUS%:*} $(cat)";
    assert_eq!(
        labelled(&hosts, script),
        [
            "[0] localhost 3 0x2:1 127.0.0.1",
            "[1] localhost 3 0x2:1 127.0.0.1",
            "[2] 127.0.0.1 3 0x2:1 127.0.0.1"
        ]
    );
    // In their first life all ranks inherit their descriptors.
    let once = "[ -z \"$POSTHASTE_FDS\" ] && echo again on $HOST; [ -z \"$POSTHASTE_FDS\" ] || [ $POSTHASTE_RANK = 1 ]";
    assert_eq!(
        labelled(&[&hosts[..], &["--restart", "1"]].concat(), once),
        ["[0] again on localhost", "[2] again on 127.0.0.1"]
    );
    let fails =
        [&hosts[..], &["-n", "3", "--", "/bin/sh", "-c", "[ $POSTHASTE_RANK = 2 ] && exit 9; exec sleep 60"]];
    let out = run(&fails.concat());
    assert_eq!(out.status.code(), Some(9));
    assert!(text(&out.stderr).contains("rank 2"), "{}", text(&out.stderr));
    let out = run(&[&hosts[..], &["-n", "4", "--", "/bin/true"]].concat());
    assert!(
        text(&out.stderr).contains("4 ranks do not fit on 2 hosts with 3 slots"),
        "{}",
        text(&out.stderr)
    );
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn an_agent_that_nobody_gives_orders_ends() {
    let mut agent = Command::new(PROGRAM);
    let out = agent.arg("agent").stdin(std::process::Stdio::null()).output().unwrap();
    assert!(out.status.success());
    assert!(text(&out.stdout).contains(concat!("posthaste-agent ", env!("CARGO_PKG_VERSION"))));
}

#[test]
fn ranks_that_fail_are_started_again_as_often_as_was_said() {
    // In their first life all ranks inherit their descriptors.
    let script =
        "[ -z \"$POSTHASTE_FDS\" ] && echo again; [ -z \"$POSTHASTE_FDS\" ] || [ $POSTHASTE_RANK = 0 ]";
    assert_eq!(labelled(&["-n", "3", "--restart", "1"], script), ["[1] again", "[2] again"]);
    let out = run(&["-n", "2", "--restart", "3", "--", "/bin/sh", "-c", "exit 7"]);
    assert_eq!(out.status.code(), Some(7), "{}", text(&out.stderr));
    let out = run(&["-n", "2", "--restart", "1", "--device", "shm", "--", "/bin/true"]);
    assert!(!out.status.success() && text(&out.stderr).contains("sockets"), "{}", text(&out.stderr));
}

#[test]
fn whoever_reads_slowly_gets_all_that_ranks_have_printed() {
    // More than one pipe holds and less than two: the rank ends, what it has printed is on its way.
    let script = "head -c 100000 /dev/zero | tr '\\0' x | fold -w99";
    let mut running = Command::new(PROGRAM)
        .args(["run", "--label", "-n", "1", "--", "/bin/sh", "-c", script])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // Longer than a process that a rank has left behind is waited for.
    std::thread::sleep(std::time::Duration::from_secs(4));
    let mut printed = Vec::new();
    std::io::Read::read_to_end(&mut running.stdout.take().unwrap(), &mut printed).unwrap();
    assert!(running.wait().unwrap().success());
    let printed = text(&printed);
    assert_eq!(printed.lines().map(|line| line.strip_prefix("[0] ").unwrap().len()).sum::<usize>(), 100_000);
}

#[test]
fn a_signal_that_was_ignored_when_the_launcher_was_started_ends_nothing() {
    let script =
        "trap '' HUP; exec \"$0\" run -n 1 -- /bin/sh -c 'grep SigIgn /proc/self/status; sleep 1; echo done'";
    let mut running = Command::new("/bin/sh")
        .args(["-c", script, PROGRAM])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufReader::new(running.stdout.take().unwrap());
    let mut printed = String::new();
    std::io::BufRead::read_line(&mut lines, &mut printed).unwrap();
    let pid = rustix::process::Pid::from_child(&running);
    rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    std::io::Read::read_to_string(&mut lines, &mut printed).unwrap();
    let out = running.wait_with_output().unwrap();
    assert!(out.status.success(), "{}: {}", out.status, text(&out.stderr));
    let mask = printed.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim();
    assert!(u64::from_str_radix(mask, 16).unwrap() & 1 != 0, "{printed}");
    assert!(printed.ends_with("done\n"), "{printed}");
}

#[test]
fn the_exit_code_is_the_ranks_though_nobody_reads_what_is_said() {
    let mut running = Command::new(PROGRAM)
        .args(["run", "-n", "1", "--", "/bin/sh", "-c", "sleep 0.3; exit 3"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(running.stderr.take());
    assert_eq!(running.wait().unwrap().code(), Some(3));
    // What is no program, and what is not there.
    for (program, code) in [("/dev/null/x", 126), ("/etc/passwd", 126), ("/nonexistent", 127)] {
        assert_eq!(run(&["-n", "1", "--", program]).status.code(), Some(code), "{program}");
    }
}
