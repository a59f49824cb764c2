// fibre: a stack and a switch.  In user space, since swapcontext asks the kernel at every switch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace simt {

#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(SIMT_UCONTEXT)

using Context = void*;  // a stack pointer; what it must find again lies on its stack
// Leaves the running stack behind in *from, and goes on where `to` was left.
extern "C" void simt_switch(Context* from, Context to) __attribute__((visibility("hidden")));

#ifdef __x86_64__
asm(R"(
    .text
    .globl simt_switch
    .hidden simt_switch
    .type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size simt_switch, .-simt_switch
)");
inline Context context_at(std::uint8_t* stack_end, void (*entry)()) {
    auto* top = reinterpret_cast<std::uint64_t*>(stack_end);
    *--top = 0;  // `entry` finds its stack as a call would leave it: 8 below a multiple of 16
    *--top = reinterpret_cast<std::uint64_t>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = 0;
    return top;
}
#else
asm(R"(
    .text
    .globl simt_switch
    .hidden simt_switch
    .type simt_switch, %function
simt_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size simt_switch, .-simt_switch
)");
inline Context context_at(std::uint8_t* stack_end, void (*entry)()) {
    auto* top = reinterpret_cast<std::uint64_t*>(stack_end) - 20;
    for (int saved = 0; saved < 20; ++saved) top[saved] = 0;
    top[11] = reinterpret_cast<std::uint64_t>(entry);  // x30, where `ret` goes
    return top;
}
#endif
inline void prepare(Context& context, std::uint8_t* stack, std::size_t bytes, void (*entry)()) {
    context = context_at(stack + bytes, entry);
}
inline void switch_to(Context& from, Context& to) { simt_switch(&from, to); }

#else
}  // namespace simt
#include <ucontext.h>
namespace simt {

using Context = ucontext_t;
inline void prepare(Context& context, std::uint8_t* stack, std::size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
inline void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }

#endif

}  // namespace simt
