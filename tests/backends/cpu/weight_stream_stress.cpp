// Steps over weights in a mapped file that pass through a WeightStream, by several workers; an end in the
// middle of a step; and a file that is truncated while it is read.
//
// Usage: weight_stream_stress FILE STEPS    FILE: is written
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "mapping_guard.h"
#include "weight_stream.h"

namespace {

constexpr size_t ITEM_BYTES = 100 * 1000;  // no whole pages
constexpr size_t NUM_ITEMS = 40, NUM_RECORDS = 100;
constexpr int WORKERS = 3;

struct File {
    explicit File(const char* path) : descriptor(open(path, O_RDWR | O_CREAT | O_TRUNC, 0600)) {
        std::vector<unsigned char> item(ITEM_BYTES);
        for (size_t i = 0; i < NUM_ITEMS; ++i) {
            item.assign(ITEM_BYTES, static_cast<unsigned char>(i + 1));
            if (write(descriptor, item.data(), ITEM_BYTES) != static_cast<ssize_t>(ITEM_BYTES)) std::abort();
        }
        fsync(descriptor);  // only clean pages are given back
        data = static_cast<char*>(mmap(nullptr, bytes(), PROT_READ, MAP_SHARED, descriptor, 0));
        if (data == MAP_FAILED) std::abort();
    }
    ~File() {
        munmap(data, bytes());
        close(descriptor);
    }
    static size_t bytes() { return ITEM_BYTES * NUM_ITEMS; }
    int descriptor;
    char* data;
};

std::vector<octavo::WeightStream::Item> items_of(const File& file) {
    std::vector<octavo::WeightStream::Item> items;
    for (size_t i = 0; i < NUM_ITEMS; ++i)
        items.push_back({i * NUM_RECORDS / NUM_ITEMS, file.data + i * ITEM_BYTES, ITEM_BYTES});
    return items;
}

// Every worker runs all records and reads their items. The number of wrong bytes.
long step(octavo::WeightStream& stream, const File& file, size_t num_records) {
    const std::vector<octavo::WeightStream::Item> items = items_of(file);
    std::atomic<long> wrong{0};
    stream.begin_step();
    const auto work = [&](size_t worker) {
        for (size_t record = 0; record < num_records; ++record) {
            stream.reached(record);
            for (size_t i = 0; i < NUM_ITEMS; ++i)
                for (size_t at = worker; items[i].record == record && at < ITEM_BYTES; at += 997)
                    if (items[i].data[at] != static_cast<char>(i + 1)) ++wrong;
        }
    };
    std::vector<std::thread> workers;
    for (size_t worker = 0; worker < WORKERS; ++worker) workers.emplace_back(work, worker);
    for (std::thread& worker : workers) worker.join();
    return wrong;
}

int fail(const char* what) {
    std::printf("%s\n", what);
    return 1;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return fail("usage: weight_stream_stress FILE STEPS");
    const File file(argv[1]);
    const octavo::MappingGuard guard(file.data, File::bytes());
    for (const size_t ahead : {size_t{0}, 3 * ITEM_BYTES, 2 * File::bytes()}) {
        octavo::WeightStream stream(items_of(file), NUM_RECORDS, ahead);
        for (int i = 0; i < std::atoi(argv[2]); ++i)
            if (step(stream, file, NUM_RECORDS)) return fail("a weight has changed");
        step(stream, file, NUM_RECORDS / 3);  // ends within a step
    }
    if (guard.is_damaged()) return fail("the guard saw a failed read where there was none");
    octavo::WeightStream stream(items_of(file), NUM_RECORDS, 3 * ITEM_BYTES);
    step(stream, file, NUM_RECORDS);
    if (ftruncate(file.descriptor, File::bytes() / 2)) return fail("ftruncate");
    if (!step(stream, file, NUM_RECORDS) || !guard.is_damaged()) return fail("the truncated file was not noticed");
    return 0;
}
