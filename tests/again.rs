//! A process that joins and leaves again and again. Alone in its binary: other tests open descriptors, too.

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "current_thread")]
async fn jobs_one_after_another_leave_no_descriptor_open() {
    let open = || std::fs::read_dir("/proc/self/fd").expect("a folder").count();
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("a file");
        maps.lines().filter(|line| line.contains("memfd")).count()
    };
    let mut first = None;
    for _ in 0..10 {
        let job = posthaste::solo().await.expect("a job of one rank");
        let window = job.shmalloc::<u64>(8).await.expect("a window");
        // What is kept here, and leads back to the job.
        let (counter, clone) = (job.counter(), job.clone());
        job.register("count", move |_: posthaste::Message, _: &mut posthaste::Scope| counter.add(1))
            .expect("a handler");
        job.on_error(move |_| assert_eq!(clone.size(), 1));
        let (clone, again) = (job.clone(), job.clone());
        job.on_peer_restarted(move |_, _| assert_eq!(clone.size(), 1));
        let double = job.service("double", move |number: u64| {
            let _job = again.clone();
            async move { 2 * number }
        });
        assert_eq!(double.expect("a service").call(job.rank(), 4).await, Ok(8));
        let clone = job.clone();
        let spawned = job.register_spawned("spawned", 2, move |_: posthaste::OwnedMessage| {
            let _job = clone.clone();
            async {}
        });
        spawned.expect("a handler").send(job.rank(), "").await.expect("sent");
        window.put(job.rank(), 3, 4).await.expect("put");
        job.barrier().await.expect("a barrier");
        job.leave().await.expect("left");
        drop(window);
        // The driver ends at its next turn.
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        let most = *first.get_or_insert_with(open);
        let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while open() > most && std::time::Instant::now() < end {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        assert!(open() <= most, "descriptors stay open");
    }
    // Mappings are kept (V05): whoever has a slice of one may use it for as long as the process lives.
    assert!(mapped() <= 10 * 2, "{} mappings", mapped());
}
