// Many runs with many barriers, in each of which every worker reads what all others wrote before it.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "thread_pool.h"

namespace {

constexpr int PHASES = 5;

// `order` is shared: jobs run one after the other, in the order in which they were started.
struct Board {
    octavo::ThreadPool* pool = nullptr;
    std::vector<long> slots;
    long round = 0, played = 0;
    std::vector<const Board*>* order = nullptr;
    bool on_all = false;  // all workers take part from the start
    std::vector<int> failures;
};

// The thread that waits comes in at any of the boundaries.
void play(void* context, octavo::Worker& worker, size_t position) {
    Board& board = *static_cast<Board*>(context);
    if (board.on_all && (position != 0 || worker.count != board.pool->count())) ++board.failures[worker.index];
    if (board.order && worker.index == 0 && position == 0) board.order->push_back(&board);
    for (long phase = static_cast<long>(position); phase < PHASES; ++phase) {
        const long value = board.round * PHASES + phase;
        board.slots[worker.index] = value;
        worker.barrier();
        for (int i = 0; i < worker.count; ++i)
            if (board.slots[i] != value) ++board.failures[worker.index];
        if (worker.index == 0) ++board.played;
        board.pool->boundary(worker, phase + 1);
    }
}

// A job is started while the one before still runs, and nobody waits for that one, or somebody does in either order.
int stress_queue(octavo::ThreadPool& pool, int workers, int rounds) {
    std::vector<const Board*> order;
    Board boards[3];
    for (Board& board : boards) {
        board.pool = &pool;
        board.order = &order;
        board.slots.assign(workers, -1);
        board.failures.assign(workers, 0);
    }
    int failures = 0;
    uint32_t jobs[3] = {};
    for (long round = 0; round < rounds; ++round) {
        const int i = static_cast<int>(round % 3);
        if (round >= 2) {
            if (round % 5 == 0) {  // another thread waits for the later one at the same time
                std::thread other([&pool, job = jobs[(i + 2) % 3]] { pool.wait(job); });
                pool.wait(jobs[(i + 1) % 3]);
                other.join();
            } else {
                pool.wait(jobs[(i + (round % 11 == 0 ? 2 : 1)) % 3]);
            }
        }
        while (workers > 1 && round % 7 == 0 && !pool.is_done(pool.last_job())) usleep(1);
        if (!pool.has_room()) ++failures;
        boards[i].round = round;
        jobs[i] = pool.start(play, &boards[i]);
    }
    pool.wait(pool.last_job());
    for (size_t i = 0; i < order.size(); ++i) failures += order[i] != &boards[i % 3];
    failures += order.size() != static_cast<size_t>(rounds);
    for (const Board& board : boards)
        for (int f : board.failures) failures += f;
    return failures;
}

int stress(int workers, int rounds, octavo::PoolOptions options) {
    options.count = workers;
    octavo::ThreadPool pool(options);
    pool.reserve_scratch(1000);
    Board board;
    board.pool = &pool;
    board.slots.assign(workers, -1);
    board.failures.assign(workers, 0);
    for (; board.round < rounds; ++board.round) {
        if (board.round % 50 == 0) usleep(3000);  // long enough for the workers to sleep
        board.on_all = board.round % 7 == 0;
        if (board.on_all) {
            pool.run(play, &board);
            continue;
        }
        const uint32_t job = pool.start(play, &board);
        if (board.round % 10 == 0) {  // two threads wait for the same job
            std::thread other([&pool, job] { pool.wait(job); });
            pool.wait(job);
            other.join();
        }
        while (workers > 1 && board.round % 3 == 0 && !pool.is_done(job)) usleep(1);  // nobody else takes part
        pool.wait(job);
        if (board.round > 0) pool.wait(job - 1);  // long done
    }
    const int queue_failures = stress_queue(pool, workers, rounds);
    pool.start([](void*, octavo::Worker&, size_t) { usleep(100); }, nullptr);  // the destructor waits for it
    int failures = queue_failures + (board.played != static_cast<long>(rounds) * PHASES);
    for (int f : board.failures) failures += f;
    return failures;
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 1000;
    int failures = 0;
    for (int workers : {1, 2, 3, 4, 5, 7, 16, 17})
        for (const int spin_us : {0, 20}) {
            octavo::PoolOptions options;
            options.barrier_spin_us = options.idle_spin_us = spin_us;
            failures += stress(workers, workers > 7 ? rounds / 5 : rounds, options);
        }
    std::printf("%d failures\n", failures);
    return failures != 0;
}
