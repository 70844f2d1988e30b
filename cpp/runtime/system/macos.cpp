#include <mach/mach.h>
#include <sys/mman.h>
#include <sys/sysctl.h>

#include <cstdint>
#include <thread>

#include "runtime/system.h"
#include "runtime/system/page_range.h"

namespace whet {
namespace {

// 0 if this machine does not have the value.
template <class T>
T read_sysctl(const char* name) {
    T value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 ? value : 0;
}

}  // namespace

void release_pages(void* memory, size_t bytes) {
    const PageRange pages(memory, bytes);
    if (pages.bytes > 0) static_cast<void>(madvise(pages.begin, pages.bytes, MADV_FREE));
}

void release_file_pages(const void* memory, size_t bytes) {
    const PageRange pages(const_cast<void*>(memory), bytes);
    if (pages.bytes > 0) static_cast<void>(madvise(pages.begin, pages.bytes, MADV_DONTNEED));
}

void prefer_huge_pages(void*, size_t) {}
void keep_freed_memory() {}
void release_freed_memory(size_t) {}

ProcessMemory read_process_memory() {
    mach_task_basic_info info{};
    mach_msg_type_number_t count = MACH_TASK_BASIC_INFO_COUNT;
    const auto result = task_info(mach_task_self(), MACH_TASK_BASIC_INFO, reinterpret_cast<task_info_t>(&info), &count);
    if (result != KERN_SUCCESS) return {};
    return {static_cast<size_t>(info.resident_size), static_cast<size_t>(info.resident_size_max)};
}

MachineMemory read_machine_memory() {
    MachineMemory memory{static_cast<size_t>(read_sysctl<uint64_t>("hw.memsize")), 0};
    vm_statistics64 pages{};
    mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
    const mach_port_t host = mach_host_self();
    if (host_statistics64(host, HOST_VM_INFO64, reinterpret_cast<host_info64_t>(&pages), &count) == KERN_SUCCESS) {
        memory.available = (size_t{pages.free_count} + pages.inactive_count + pages.purgeable_count) * page_bytes();
    }
    mach_port_deallocate(mach_task_self(), host);
    return memory;
}

// A job ends with its slowest thread, so efficiency cores would slow it down.
int n_schedulable_processors() {
    const int n = read_sysctl<int>("hw.perflevel0.physicalcpu");
    return n > 0 ? n : static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace whet
