// memory: what is known of every byte that a kernel may touch, and the complaints about it.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "launch.hpp"
#include "simt.hpp"

namespace simt {

constexpr unsigned SHARED_BYTES_MAX = 96 * 1024;       // per block, of which statically:
constexpr unsigned SHARED_STATIC_BYTES_MAX = 48 * 1024;

// The moment of an access.  Block epochs are counted by barriers, warp epochs by sync_warp; neither
// is ever reset, so that nothing of an earlier block needs to be forgotten.
struct Moment {
    std::uint32_t epoch, warp_epoch;
    std::uint16_t thread, warp;
};
constexpr std::uint16_t SEVERAL = 0xffff;

struct Cell {  // the last write to a byte of shared memory, and the reads since the last barrier
    Moment write{}, read{};
};

class SharedMemory {
public:
    SharedMemory();
    void begin_launch(unsigned dynamic_bytes);
    void begin_block(std::uint32_t first_epoch) { first_epoch_ = first_epoch; }
    void* array(const void* key, unsigned bytes, Site site);
    void* dynamic() { return bytes_; }
    void check_read(const void* p, unsigned size, const Moment& now, Site site);
    void check_write(void* p, unsigned size, const Moment& now, Site site);
    unsigned offset(const void* p) const {
        return unsigned(static_cast<const std::uint8_t*>(p) - bytes_);
    }

private:
    Cell* cells(const void* p, unsigned size, const char* verb, Site site);
    std::vector<std::uint8_t> storage_;
    std::uint8_t* bytes_;
    std::vector<Cell> cells_;
    std::map<const void*, unsigned> arrays_;  // declaration -> offset
    unsigned dynamic_bytes_ = 0, used_ = 0;
    std::uint32_t first_epoch_ = 0;
};

// One launch's global memory.  Its marks of what is written are shared by all workers.
class GlobalMemory {
public:
    void begin_launch(const Request& request) { request_ = &request; }
    void check_read(const void* p, unsigned size, Site site);
    void check_write(void* p, unsigned size, Site site);

private:
    const Region& region(const void* p, unsigned size, bool writes, Site site);
    const Request* request_ = nullptr;
    unsigned last_ = 0;  // most accesses are to the region of the one before
};

// Bank conflicts.  What lanes do between two collectives is paired up: the k-th access of a line by
// one lane belongs to the k-th of the others.
class BankCounter {
public:
    void note(unsigned lane, unsigned offset, unsigned size, Site site);
    void flush();
    const std::map<std::pair<const char*, int>, BankCount>& counts() const { return counts_; }

private:
    struct Access { unsigned lane, offset, size; };
    std::map<std::pair<const char*, int>, std::vector<std::vector<Access>>> pending_;
    std::map<std::pair<const char*, int>, unsigned[32]> occurrences_;
    std::map<std::pair<const char*, int>, BankCount> counts_;
};

}  // namespace simt
