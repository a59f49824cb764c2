// mma: the fragment maps of m8n8k4, as common.cuh states them, on the registers of 32 lanes.
//
// Products of halves are exact in f32; they are added in the order of k, then to the accumulator,
// each sum rounded to f32.  The hardware's inner rounding is not specified and differs.
#include "simt.hpp"

namespace simt {
namespace {

float half_at(const std::uint32_t* registers, int i) {
    return float(half_of(std::uint16_t(registers[i / 2] >> 16 * (i % 2))));
}

template <bool B_IS_ROW_MAJOR>
void mma(void* const* lanes) {
    for (int quad_pair = 0; quad_pair < 4; ++quad_pair) {
        float a[8][4], b[4][8], product[8][8];
        Mma* held[8];
        for (int r = 0; r < 8; ++r) {
            held[r] = static_cast<Mma*>(lanes[4 * quad_pair + (r & 3) + (r >> 2) * 16]);
            for (int i = 0; i < 4; ++i) {
                a[r][i] = half_at(held[r]->a, i);
                const float value = half_at(held[r]->b, i);
                if (B_IS_ROW_MAJOR) b[r & 3][i + (r & 4)] = value;
                else b[i][r] = value;
            }
        }
        for (int row = 0; row < 8; ++row) {
            for (int column = 0; column < 8; ++column) {
                product[row][column] = a[row][0] * b[0][column];
            }
            for (int k = 1; k < 4; ++k) {
                for (int column = 0; column < 8; ++column) {
                    product[row][column] += a[row][k] * b[k][column];
                }
            }
        }
        for (int r = 0; r < 8; ++r) {
            for (int i = 0; i < 8; ++i) {
                const int row = (r & 1) + (i & 2) + (r & 4), column = (i & 4) + (r & 2) + (i & 1);
                held[r]->c[i] += product[row][column];
            }
        }
    }
}

}  // namespace

void mma_row_col(void* const* lanes) { mma<false>(lanes); }
void mma_row_row(void* const* lanes) { mma<true>(lanes); }

}  // namespace simt
