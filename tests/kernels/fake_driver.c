// A driver of two GPUs for tests of driver.py: libcuda and NVML in one library, by CUDA's headers.
// FAKE_DRIVER chooses what is wrong: "no devices", "broken", "no nvml".
#include <stdlib.h>
#include <string.h>

static int is(const char* what) {
    const char* wrong = getenv("FAKE_DRIVER");
    return wrong && !strcmp(wrong, what);
}

int cuInit(unsigned flags) { return flags ? 1 : is("no devices") ? 100 : is("broken") ? 803 : 0; }
int cuDriverGetVersion(int* version) { return *version = 12090, 0; }
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGet(int* device, int index) { return *device = 40 + index, 0; }
int cuDeviceGetName(char* name, int size, int device) {
    if (size < 32) return 1;
    strcpy(name, device == 40 ? "Tesla V100-SXM2-16GB" : "NVIDIA H200");
    return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) {
    return *bytes = device == 40 ? (size_t)16 << 30 : (size_t)140 << 30, 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    if (attribute != 75 && attribute != 76) return 1;
    return *value = attribute == 76 ? 0 : device == 40 ? 7 : 9, 0;
}
int cuDeviceGetPCIBusId(char* bus, int size, int device) {
    if (size < 13) return 1;
    return strcpy(bus, device == 40 ? "0000:3B:00.0" : "0000:5E:00.0"), 0;
}
int cuDeviceCanAccessPeer(int* able, int device, int peer) {
    return *able = device == 40 && peer == 41, 0;  // one direction alone
}
int cuGetErrorString(int code, const char** text) {
    return *text = code == 803 ? "system has unsupported display driver" : "something", 0;
}

struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { return is("no nvml") ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char* text, unsigned size) {
    return size < 16 ? 7 : (strcpy(text, "575.57.08"), 0);
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** handle) {
    if (strcmp(bus, "0000:3B:00.0")) return 6;  // NVML does not know the other
    return *handle = (void*)0x123456789abcdef0, 0;
}
int nvmlDeviceGetMemoryInfo(void* handle, struct memory* found) {
    if (handle != (void*)0x123456789abcdef0) return 2;
    found->total = 16ull << 30, found->free = 15ull << 30, found->used = 1ull << 30;
    return 0;
}
