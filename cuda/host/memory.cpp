#include "memory.hpp"

#include <set>

namespace simt {
namespace {

void check_alignment(const void* p, unsigned size, const char* verb, Site site) {
    const auto address = reinterpret_cast<std::uintptr_t>(p);
    if (address % size) {
        fault(site, "a %s of %u bytes at an address that is %u over a multiple of %u", verb, size,
              unsigned(address % size), size);
    }
}

}  // namespace

// --- shared --------------------------------------------------------------------------------------

SharedMemory::SharedMemory() : storage_(SHARED_BYTES_MAX + 128), cells_(SHARED_BYTES_MAX) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    bytes_ = storage_.data() + (128 - address % 128) % 128;
}

void SharedMemory::begin_launch(unsigned dynamic_bytes) {
    arrays_.clear();
    dynamic_bytes_ = dynamic_bytes;
    used_ = (dynamic_bytes + 15) / 16 * 16;
}

void* SharedMemory::array(const void* key, unsigned bytes, Site site) {
    const auto known = arrays_.find(key);
    if (known != arrays_.end()) return bytes_ + known->second;
    const unsigned offset = used_;
    used_ += (bytes + 15) / 16 * 16;
    if (used_ > SHARED_BYTES_MAX || used_ - dynamic_bytes_ > SHARED_STATIC_BYTES_MAX + 15) {
        fault(site, "shared memory: %u bytes, %u of them dynamic; a block has %u, %u static", used_,
              dynamic_bytes_, SHARED_BYTES_MAX, SHARED_STATIC_BYTES_MAX);
    }
    arrays_[key] = offset;
    return bytes_ + offset;
}

Cell* SharedMemory::cells(const void* p, unsigned size, const char* verb, Site site) {
    check_alignment(p, size, verb, site);
    const auto* byte = static_cast<const std::uint8_t*>(p);
    if (byte < bytes_ || byte + size > bytes_ + used_) {
        fault(site, "out of bounds: a %s of %u bytes at offset %td of %u bytes of shared memory",
              verb, size, byte - bytes_, used_);
    }
    return cells_.data() + offset(p);
}

void SharedMemory::check_read(const void* p, unsigned size, const Moment& now, Site site) {
    Cell* cell = cells(p, size, "read", site);
    for (Cell* end = cell + size; cell < end; ++cell) {
        Moment& write = cell->write;
        if (write.epoch < first_epoch_) {
            fault(site, "a read of shared memory, offset %u, that nothing wrote", offset(p));
        }
        if (write.epoch == now.epoch && write.thread != now.thread &&
            !(write.warp == now.warp && write.warp_epoch < now.warp_epoch)) {
            fault(site, "race: a read of shared memory, offset %u, that thread %u wrote, without a "
                  "barrier between", offset(p), write.thread);
        }
        Moment& read = cell->read;
        if (read.epoch != now.epoch) {
            read = now;
        } else {
            if (read.thread != now.thread) read.thread = SEVERAL;
            if (read.warp != now.warp) read.warp = SEVERAL;
            read.warp_epoch = now.warp_epoch;
        }
    }
}

void SharedMemory::check_write(void* p, unsigned size, const Moment& now, Site site) {
    Cell* cell = cells(p, size, "write", site);
    for (Cell* end = cell + size; cell < end; ++cell) {
        for (const Moment* before : {&cell->write, &cell->read}) {
            if (before->epoch != now.epoch || before->thread == now.thread ||
                (before->warp == now.warp && before->warp_epoch < now.warp_epoch)) {
                continue;
            }
            if (before->thread == SEVERAL) {
                fault(site, "race: a write to shared memory, offset %u, that several threads read, "
                      "without a barrier between", offset(p));
            }
            fault(site, "race: a write to shared memory, offset %u, that thread %u %s, without a "
                  "barrier between", offset(p), before->thread,
                  before == &cell->write ? "wrote" : "read");
        }
        cell->write = now;
    }
}

// --- global --------------------------------------------------------------------------------------

// The operand that an access falls into; for a write one that may be written, if operands overlap.
const Region& GlobalMemory::region(const void* p, unsigned size, bool writes, Site site) {
    const char* verb = writes ? "write" : "read";
    check_alignment(p, size, verb, site);
    const auto address = reinterpret_cast<std::uintptr_t>(p);
    const auto holds = [&](const Region& region) {
        const auto begin = reinterpret_cast<std::uintptr_t>(region.begin);
        return address >= begin && address + size <= begin + region.bytes;
    };
    const auto serves = [&](const Region& region) { return !writes || region.is_writable; };
    if (last_ < request_->region_count && holds(request_->regions[last_]) &&
        serves(request_->regions[last_])) {
        return request_->regions[last_];
    }
    const Region* below = nullptr;  // the last region that begins before the address
    const Region* input = nullptr;  // one that holds it, and is not to be written
    for (unsigned i = 0; i < request_->region_count; ++i) {
        const Region& each = request_->regions[i];
        if (holds(each)) {
            if (!serves(each)) {
                input = &each;
                continue;
            }
            last_ = i;
            return each;
        }
        if (reinterpret_cast<std::uintptr_t>(each.begin) <= address &&
            (!below || each.begin > below->begin)) {
            below = &each;
        }
    }
    if (input) return *input;
    if (!below) fault(site, "out of bounds: a %s of %u bytes before all arguments", verb, size);
    fault(site, "out of bounds: a %s of %u bytes at byte %td of `%s`, which has %llu", verb, size,
          static_cast<const std::uint8_t*>(p) - below->begin, below->name,
          static_cast<unsigned long long>(below->bytes));
}

void GlobalMemory::check_read(const void* p, unsigned size, Site site) {
    const Region& from = region(p, size, false, site);
    if (!from.written) return;
    const auto offset = static_cast<const std::uint8_t*>(p) - from.begin;
    for (unsigned i = 0; i < size; ++i) {
        if (!from.written[offset + i]) {
            fault(site, "a read of `%s`, byte %td, that nothing wrote", from.name, offset + i);
        }
    }
}

void GlobalMemory::check_write(void* p, unsigned size, Site site) {
    const Region& to = region(p, size, true, site);
    const auto offset = static_cast<std::uint8_t*>(p) - to.begin;
    if (!to.is_writable) fault(site, "a write to `%s`, byte %td: it is an input", to.name, offset);
    if (to.written) std::memset(to.written + offset, 1, size);
}

// --- banks ---------------------------------------------------------------------------------------

void BankCounter::note(unsigned lane, unsigned offset, unsigned size, Site site) {
    const std::pair key{site.file, site.line};
    auto& instructions = pending_[key];
    const unsigned occurrence = occurrences_[key][lane]++;
    if (instructions.size() <= occurrence) instructions.resize(occurrence + 1);
    instructions[occurrence].push_back({lane, offset, size});
}

// 32 banks of 4 bytes.  An access of 8 bytes goes in two halves of a warp, one of 16 in quarters;
// each takes as many wavefronts as the busiest bank has distinct words.
void BankCounter::flush() {
    for (const auto& [key, instructions] : pending_) {
        BankCount& count = counts_[key];
        count.file = key.first;
        count.line = std::uint64_t(key.second);
        for (const auto& accesses : instructions) {
            const unsigned parts = std::max(1u, accesses.front().size / 4), lanes = 32 / parts;
            ++count.accesses;
            for (unsigned part = 0; part < parts; ++part) {
                std::set<unsigned> words[32];
                for (const Access& access : accesses) {
                    if (access.lane / lanes != part) continue;
                    for (unsigned byte = 0; byte < access.size; byte += 4) {
                        const unsigned word = (access.offset + byte) / 4;
                        words[word % 32].insert(word);
                    }
                }
                std::size_t busiest = 0;
                for (const auto& bank : words) busiest = std::max(busiest, bank.size());
                count.wavefronts += busiest;
                count.wavefronts_ideal += busiest > 0;
            }
        }
    }
    pending_.clear();
    occurrences_.clear();
}

}  // namespace simt
