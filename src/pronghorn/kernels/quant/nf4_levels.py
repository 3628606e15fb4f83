"""A device function of the NF4 kernels: 4-bit numbers to their levels, out of the registers of a warp's threads."""

from __future__ import annotations

from pronghorn.kernels.runtime.dispatch import jit, tl


@jit
def nf4_shuffled_levels(code, words):
    """[GROUPS, 8] words of 4 bytes -> [GROUPS, 64] fp32 levels.

    Thread i of a warp holds level i mod 16, and a shuffle fetches what the thread of the given number holds. It looks at 5 bits
    of the number: one more than we mean, which is why the levels are there twice. All threads of a warp get here together.
    """
    l0, l1, l2, l3, l4, l5, l6, l7 = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 lane, number;
        .reg .b64 place;
        .reg .f32 level;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, 15;
        mad.wide.u32 place, lane, 4, $9;
        ld.global.nc.f32 level, [place];
        shr.b32 number, $8, 4;
        shfl.sync.idx.b32 $0, level, number, 31, -1;
        shfl.sync.idx.b32 $1, level, $8, 31, -1;
        shr.b32 number, $8, 12;
        shfl.sync.idx.b32 $2, level, number, 31, -1;
        shr.b32 number, $8, 8;
        shfl.sync.idx.b32 $3, level, number, 31, -1;
        shr.b32 number, $8, 20;
        shfl.sync.idx.b32 $4, level, number, 31, -1;
        shr.b32 number, $8, 16;
        shfl.sync.idx.b32 $5, level, number, 31, -1;
        shr.b32 number, $8, 28;
        shfl.sync.idx.b32 $6, level, number, 31, -1;
        shr.b32 number, $8, 24;
        shfl.sync.idx.b32 $7, level, number, 31, -1;
        }
        """,
        "=f,=f,=f,=f,=f,=f,=f,=f,r,l", [words, code.to(tl.int64)],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=False, pack=1,  # not to be moved behind a condition
    )  # fmt: skip
    even = tl.join(tl.join(l0, l4), tl.join(l2, l6))  # [GROUPS, 8, 2, 2]: a join adds the fastest dimension
    odd = tl.join(tl.join(l1, l5), tl.join(l3, l7))
    return tl.reshape(tl.join(even, odd), (words.shape[0], 64))
