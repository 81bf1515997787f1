package main

import (
	"fmt"

	"harness-s/kernels"
)

// benchPage is the page size that decode is measured with: the sampler's own.
const benchPage = 16

// attention are those of 6.6.
func (s caseShape) attention() []kernelCase {
	x := float64(s.T)
	ks := []kernelCase{
		{name: fmt.Sprintf("attnprep/T=%d", s.T), op: kernels.OpAttnPrep, bytes: 4 * x * float64(s.aq+s.akv), args: func(r *kernelRig) any {
			return &kernels.AttnPrepArgs{T: s.T, NH: s.nh, NKV: s.nkv, HD: s.hd, Rot: s.rot, Theta: 1e7, Eps: 1e-6, RopePos: r.ints(s.T, func(i int64) int32 { return int32(i) }),
				QG: r.real(s.T * 2 * s.aq), KIn: r.real(s.T * s.akv), WQ: r.real(s.hd), WK: r.real(s.hd), Q: r.real(s.T * s.aq), K: r.real(s.T * s.akv)}
		}},
		{name: fmt.Sprintf("gate/T=%d", s.T), op: kernels.OpGate, bytes: 6 * x * float64(s.aq), args: func(r *kernelRig) any {
			return &kernels.GateArgs{T: s.T, NH: s.nh, HD: s.hd, O: r.real(s.T * s.aq), QG: r.real(s.T * 2 * s.aq), Y: r.real(s.T * s.aq)}
		}},
	}
	for _, seq := range []int64{s.seq, s.T} {
		// A causal row sees half of its sequence on average.
		flops := 4 * float64(s.aq) * x * float64(seq) / 2
		bytes := 4 * x * float64(s.aq+s.akv)
		ks = append(ks, kernelCase{name: fmt.Sprintf("attn/T=%d/seq=%d", s.T, seq), op: kernels.OpAttn, bytes: bytes, flops: flops, args: func(r *kernelRig) any {
			f, _ := r.forest(s.T, seq)
			return &kernels.AttnArgs{T: s.T, NH: s.nh, NKV: s.nkv, HD: s.hd, F: f, Q: r.real(s.T * s.aq), K: r.real(s.T * s.akv), V: r.real(s.T * s.akv), O: r.real(s.T * s.aq), LSE: r.wide(s.T * s.nh)}
		}}, kernelCase{name: fmt.Sprintf("attn_bwd/T=%d/seq=%d", s.T, seq), op: kernels.OpAttnBwd, bytes: 2 * bytes, flops: 2.5 * flops, args: func(r *kernelRig) any {
			f, _ := r.forest(s.T, seq)
			q, kv := func() kernels.Ptr { return r.real(s.T * s.aq) }, func() kernels.Ptr { return r.real(s.T * s.akv) }
			return &kernels.AttnBwdArgs{T: s.T, NH: s.nh, NKV: s.nkv, HD: s.hd, F: f, Q: q(), K: kv(), V: kv(), O: q(), LSE: r.between(r.dt.Wide(), s.T*s.nh, 5, 9), DO: q(), DQ: q(), DK: kv(), DV: kv()}
		}})
	}
	for _, B := range s.B {
		pages := (s.ctx + benchPage - 1) / benchPage
		at := func(r *kernelRig) (seq, pos, table kernels.Ptr) {
			return r.ints(B, func(i int64) int32 { return int32(i) }), r.ints(B, func(int64) int32 { return int32(s.ctx - 1) }), r.ints(B*pages, func(i int64) int32 { return int32(i) })
		}
		ks = append(ks, kernelCase{name: fmt.Sprintf("attn_paged/B=%d", B), op: kernels.OpAttnPaged, bytes: 4 * float64(B*s.ctx*s.akv), args: func(r *kernelRig) any {
			seq, pos, table := at(r)
			cache := func() kernels.Ptr { return r.real(B * pages * benchPage * s.akv) }
			return &kernels.AttnPagedArgs{T: B, NH: s.nh, NKV: s.nkv, HD: s.hd, PageSize: benchPage, MaxPages: pages, Seq: seq, Pos: pos, BlockTable: table, Q: r.real(B * s.aq), KCache: cache(), VCache: cache(), O: r.real(B * s.aq)}
		}}, kernelCase{name: fmt.Sprintf("kv_write/B=%d", B), op: kernels.OpKVWrite, bytes: 8 * float64(B*s.akv), args: func(r *kernelRig) any {
			seq, pos, table := at(r)
			cache := func() kernels.Ptr { return r.real(B * pages * benchPage * s.akv) }
			return &kernels.KVWriteArgs{T: B, NKV: s.nkv, HD: s.hd, PageSize: benchPage, MaxPages: pages, Seq: seq, Pos: pos, BlockTable: table, K: r.real(B * s.akv), V: r.real(B * s.akv), KCache: cache(), VCache: cache()}
		}})
	}
	return ks
}

// ends are embedding, head, loss, sampling and the copy of a fork: 6.2, 6.7 to 6.9.
func (s caseShape) ends() []kernelCase {
	x, chunk := float64(s.T), min(max(8<<20/s.v, 64), 512)
	ids := func(r *kernelRig, n int64) kernels.Ptr {
		return r.ints(n, func(i int64) int32 { return int32(i * 7919 % s.v) })
	}
	head := 2 * float64(s.v) * float64(s.h) * float64(s.wave)
	ks := []kernelCase{
		{name: fmt.Sprintf("embed/T=%d", s.T), op: kernels.OpEmbed, bytes: 4 * x * float64(s.h), args: func(r *kernelRig) any {
			return &kernels.EmbedArgs{T: s.T, D: s.h, V: s.v, IDs: ids(r, s.T), W: r.real(s.v * s.h), Y: r.real(s.T * s.h)}
		}},
		{name: fmt.Sprintf("embed_bwd/T=%d", s.T), op: kernels.OpEmbedBwd, bytes: 10 * x * float64(s.h), args: func(r *kernelRig) any {
			return &kernels.EmbedBwdArgs{T: s.T, D: s.h, V: s.v, IDs: ids(r, s.T), DY: r.real(s.T * s.h), DW: r.wide(s.v * s.h)}
		}},
		{name: fmt.Sprintf("lmhead/T=%d", s.wave), op: kernels.OpLMHead, flops: head, args: func(r *kernelRig) any {
			n := s.wave
			return &kernels.LMHeadArgs{N: n, T: n, D: s.h, V: s.v, VocabValid: s.v, Chunk: chunk, Temperature: 1, Row: r.ints(n, func(i int64) int32 { return int32(i) }), Target: ids(r, n),
				X: r.real(n * s.h), W: r.real(s.v * s.h), LogP: r.wide(n), Entropy: r.wide(n), LSE: r.wide(n)}
		}},
		{name: fmt.Sprintf("lmhead_bwd/T=%d", s.wave), op: kernels.OpLMHeadBwd, flops: 3 * head, args: func(r *kernelRig) any {
			n := s.wave
			return &kernels.LMHeadBwdArgs{N: n, T: n, D: s.h, V: s.v, VocabValid: s.v, Chunk: chunk, Temperature: 1, Row: r.ints(n, func(i int64) int32 { return int32(i) }), Target: ids(r, n),
				X: r.real(n * s.h), W: r.real(s.v * s.h), LSE: r.between(r.dt.Wide(), n, 12, 13), Entropy: r.between(r.dt.Wide(), n, 11, 12), DLogP: r.wide(n), DX: r.real(n * s.h), DW: r.wide(s.v * s.h)}
		}},
	}
	for _, B := range s.B {
		ks = append(ks, kernelCase{name: fmt.Sprintf("sample/B=%d", B), op: kernels.OpSample, bytes: 4 * float64(B*s.v), args: func(r *kernelRig) any {
			return &kernels.SampleArgs{B: B, V: s.v, VocabValid: s.v, Logits: r.between(r.dt.Wide(), B*s.v, -5, 5), Rows: r.sampling(B), Token: r.alloc(4 * B), LogP: r.wide(B), Entropy: r.wide(B)}
		}}, kernelCase{name: fmt.Sprintf("lmhead_sample/B=%d", B), op: kernels.OpLMHeadSample, bytes: 2 * float64(s.v*s.h), flops: 2 * float64(B*s.v*s.h), args: func(r *kernelRig) any {
			return &kernels.LMHeadSampleArgs{B: B, D: s.h, V: s.v, VocabValid: s.v, X: r.real(B * s.h), W: r.real(s.v * s.h), Rows: r.sampling(B), Token: r.alloc(4 * B), LogP: r.wide(B), Entropy: r.wide(B)}
		}})
	}
	const forks = 8
	state := 4 * s.nv * s.dk * s.dv // of one layer
	return append(ks, kernelCase{name: fmt.Sprintf("slot_copy/forks=%d", forks), op: kernels.OpSlotCopy, bytes: (forks + 1) * float64(state), args: func(r *kernelRig) any {
		return &kernels.SlotCopyArgs{N: forks, Bytes: state, Src: r.ints(forks, func(int64) int32 { return 0 }), Dst: r.ints(forks, func(i int64) int32 { return int32(i) + 1 }), Base: r.between(kernels.F32, (forks+1)*state/4, -1, 1)}
	}})
}
