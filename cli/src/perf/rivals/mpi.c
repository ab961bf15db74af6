// What an MPI program gets for the benchmarks of `posthaste perf`: the same patterns, by the same clock.
//
//   program BENCH SIZE COUNT SECONDS [CORE...]
//
// Rank r stays on the r-th core, if there is one for each. Rank 0 prints "figure VALUE".
#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int me, ranks;
static size_t size;
static int count;
static double seconds;
static char *from, *into;
static MPI_Request *requests;
static MPI_Win window;
static char *memory;
static volatile uint64_t summed;

static void stop(const char *why) {
    fprintf(stderr, "%s\n", why);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void *bytes(size_t len) {
    char *buffer = NULL;
    if (posix_memalign((void **)&buffer, 4096, len ? len : 1)) stop("no memory");
    for (size_t at = 0; at < len; at++) buffer[at] = (char)(at * 7);
    return buffer;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

// Microseconds of an operation that all ranks carry out: the median of batches of about 10 ms, at rank 0.
static double repeated(void (*operation)(void)) {
    static double samples[100000];
    int taken = 0, first = 1;
    long long times = 3;
    double start = MPI_Wtime();
    while (times > 0) {
        double batch = MPI_Wtime();
        for (long long i = 0; i < times; i++) operation();
        double now = MPI_Wtime(), each = (now - batch) / times;
        if (!first && taken < 100000) samples[taken++] = each * 1e6;
        first = 0;
        if (taken > 0 && now - start >= seconds) {
            times = 0;
        } else {
            double wanted = 0.01 / each;
            times = wanted < 1 ? 1 : wanted > 1000 ? 1000 : (long long)wanted;
        }
        MPI_Bcast(&times, 1, MPI_LONG_LONG, 0, MPI_COMM_WORLD);
    }
    qsort(samples, taken, sizeof samples[0], compare);
    return samples[taken / 2];
}

static void acknowledge(void) {
    char byte = 0;
    if (me == 0) MPI_Recv(&byte, 1, MPI_CHAR, 1, 9, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    else if (me == 1) MPI_Send(&byte, 1, MPI_CHAR, 0, 9, MPI_COMM_WORLD);
}

// Adds up what has come, as our handlers do.
static void read_it(const char *message) {
    const uint64_t *words = (const uint64_t *)message;
    uint64_t sum = 0;
    for (size_t i = 0; i < size / 8; i++) sum += words[i];
    summed += sum;
}

static void pingpong(void) {
    if (me == 0) {
        MPI_Send(from, size, MPI_CHAR, 1, 1, MPI_COMM_WORLD);
        MPI_Recv(into, size, MPI_CHAR, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        read_it(into);
    } else if (me == 1) {
        MPI_Recv(into, size, MPI_CHAR, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        read_it(into);
        MPI_Send(from, size, MPI_CHAR, 0, 1, MPI_COMM_WORLD);
    }
}

// Messages one way, and an acknowledgement of all. What is long is received into one buffer and added up.
static void one_way(void) {
    int window = count < 64 ? count : 64;
    if (me == 0) {
        for (int sent = 0; sent < count; sent += window) {
            int some = count - sent < window ? count - sent : window;
            for (int i = 0; i < some; i++) MPI_Isend(from, size, MPI_CHAR, 1, 2, MPI_COMM_WORLD, &requests[i]);
            MPI_Waitall(some, requests, MPI_STATUSES_IGNORE);
        }
    } else if (me == 1 && size < 1024) {
        for (int got = 0; got < count; got += window) {
            int some = count - got < window ? count - got : window;
            for (int i = 0; i < some; i++)
                MPI_Irecv(into + i * size, size, MPI_CHAR, 0, 2, MPI_COMM_WORLD, &requests[i]);
            MPI_Waitall(some, requests, MPI_STATUSES_IGNORE);
        }
    } else if (me == 1) {
        // One is received while the one before is read.
        MPI_Irecv(into, size, MPI_CHAR, 0, 2, MPI_COMM_WORLD, &requests[0]);
        for (int got = 0; got < count; got++) {
            MPI_Wait(&requests[got % 2], MPI_STATUS_IGNORE);
            if (got + 1 < count)
                MPI_Irecv(into + (got + 1) % 2 * size, size, MPI_CHAR, 0, 2, MPI_COMM_WORLD,
                          &requests[(got + 1) % 2]);
            read_it(into + got % 2 * size);
        }
    }
    acknowledge();
}

static void persistent(void) {
    if (me > 1) return;
    MPI_Startall(count, requests);
    MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
    acknowledge();
}

static void puts_flushed(void) {
    if (me) return;
    for (int i = 0; i < count; i++) {
        MPI_Put(from, size, MPI_CHAR, 1, size == 8 ? i % 1024 * 8 : 0, size, MPI_CHAR, window);
        MPI_Win_flush(1, window);
    }
}

static void gets_flushed(void) {
    if (me) return;
    for (int i = 0; i < count; i++) {
        MPI_Get(into, size, MPI_CHAR, 1, size == 8 ? i % 1024 * 8 : 0, size, MPI_CHAR, window);
        MPI_Win_flush(1, window);
    }
}

static void barrier(void) { MPI_Barrier(MPI_COMM_WORLD); }

static void all_reduce(void) { MPI_Allreduce(from, into, size / 8, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD); }

static void all_to_all(void) { MPI_Alltoall(from, size, MPI_CHAR, into, size, MPI_CHAR, MPI_COMM_WORLD); }

static void broadcast(void) {
    for (int i = 0; i < count; i++) MPI_Bcast(me ? into : from, size, MPI_CHAR, 0, MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
}

static double windowed(void (*operation)(void)) {
    MPI_Aint len = size == 8 ? 1024 * 8 : size;
    MPI_Win_allocate(len, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &window);
    memset(memory, me, len);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_lock_all(0, window);
    double time = repeated(operation);
    MPI_Win_unlock_all(window);
    MPI_Win_free(&window);
    return time;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 5) stop("BENCH SIZE COUNT SECONDS [CORE...]");
    const char *bench = argv[1];
    size = strtoull(argv[2], NULL, 10);
    count = atoi(argv[3]);
    seconds = atof(argv[4]);
    // Whatever happens to those who started it, it ends.
    alarm((unsigned)(seconds * 4 + 60));
    if (argc - 5 >= ranks) {
        cpu_set_t cores;
        CPU_ZERO(&cores);
        CPU_SET(atoi(argv[5 + me]), &cores);
        if (sched_setaffinity(0, sizeof cores, &cores)) stop("a rank cannot be put on its core");
    }
    size_t batch = count > 2 ? count : 2;
    size_t most = size * (size_t)ranks;
    if (size < 65536 && size * batch > most) most = size * batch;
    if (size * 2 > most) most = size * 2;
    from = bytes(most);
    into = bytes(most);
    requests = calloc(batch, sizeof *requests);
    if (!requests) stop("no memory");
    double figure;
    if (!strcmp(bench, "latency")) figure = repeated(pingpong) / 2;
    else if (!strcmp(bench, "rate")) figure = count / repeated(one_way);
    else if (!strcmp(bench, "bandwidth")) figure = (double)count * size / repeated(one_way) / 1e3;
    else if (!strcmp(bench, "put_rate")) figure = count / windowed(puts_flushed);
    else if (!strcmp(bench, "get_rate")) figure = count / windowed(gets_flushed);
    else if (!strcmp(bench, "put_bandwidth")) figure = (double)count * size / windowed(puts_flushed) / 1e3;
    else if (!strcmp(bench, "get_bandwidth")) figure = (double)count * size / windowed(gets_flushed) / 1e3;
    else if (!strcmp(bench, "persistent")) {
        for (int i = 0; me < 2 && i < count; i++) {
            if (me == 0) MPI_Send_init(from + i * size, size, MPI_CHAR, 1, 3, MPI_COMM_WORLD, &requests[i]);
            else MPI_Recv_init(into + i * size, size, MPI_CHAR, 0, 3, MPI_COMM_WORLD, &requests[i]);
        }
        figure = repeated(persistent);
        for (int i = 0; me < 2 && i < count; i++) MPI_Request_free(&requests[i]);
    } else if (!strcmp(bench, "barrier")) figure = repeated(barrier);
    else if (!strcmp(bench, "all_reduce")) figure = repeated(all_reduce);
    else if (!strcmp(bench, "all_reduce_bandwidth")) figure = size / repeated(all_reduce) / 1e3;
    else if (!strcmp(bench, "all_to_all")) figure = repeated(all_to_all);
    else if (!strcmp(bench, "broadcast")) figure = (double)count * size / repeated(broadcast) / 1e3;
    else {
        stop("no such benchmark");
        return 1;
    }
    if (me == 0) printf("figure %g\n", figure);
    fflush(stdout);
    MPI_Finalize();
    return 0;
}
