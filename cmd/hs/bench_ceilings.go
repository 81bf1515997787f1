package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"harness-s/kernels"
)

// measureCeilings times a large copy and large products. On a GPU the product is 8192 cubed, by the table's own kernel and by cuBLASLt where
// that loads, whichever is faster; elsewhere sizes are what a host computes in moments. gemm is the product that stays configured.
// The device is opened for that alone: what the benchmark itself holds is counted apart.
func measureCeilings(ctx context.Context, g *globals, dt kernels.DType, gemm string) (c ceilings, err error) {
	bytes, size, count, kinds := int64(256<<20), int64(1024), 3, []string{gemm}
	switch {
	case g.deviceName(g.Device) == "emu":
		bytes, size, count = 1<<22, 64, 1
	case strings.HasPrefix(g.deviceName(g.Device), "cuda"):
		bytes, size, count, kinds = 4<<30, 8192, 10, []string{"own", "cublaslt"}
	}
	for _, kind := range kinds {
		if err := ctx.Err(); err != nil {
			return c, err
		}
		dev, err := g.device(g.Device, g.Threads, kind)
		if err != nil && kind == "cublaslt" {
			g.say("# no product by cuBLASLt to compare with: %v", err)
			continue
		}
		if err != nil {
			return c, err
		}
		if dev.Info().Backend == "emu" { // also behind a stand-in driver
			bytes, size, count = 1<<22, 64, 1
		}
		err = c.measure(dev, kind, dt, bytes, size, count)
		if err = errors.Join(err, dev.Close()); err != nil {
			return c, err
		}
	}
	return c, nil
}

// measure raises the ceilings by what a device with that kind of product reaches.
func (c *ceilings) measure(dev *kernels.Device, kind string, dt kernels.DType, bytes, size int64, count int) error {
	copied, err := copyRate(dev, bytes, count)
	if err != nil {
		return err
	}
	rate, err := gemmRateOf(dev, dt, size, size, size, count)
	if err != nil && kind != "own" && errors.Is(err, kernels.ErrUnsupported) {
		return nil // the library has no algorithm of the kind that is used
	}
	if c.CopyBytesPerS = max(c.CopyBytesPerS, copied); 1e9*rate > c.GemmFLOPS {
		c.GemmFLOPS, c.Gemm = 1e9*rate, fmt.Sprintf("%s, %d cubed, %v", kind, size, dt)
	}
	return err
}

// copyRate is the median rate of a copy of half of bytes to the other half, counting bytes read and written.
func copyRate(dev *kernels.Device, bytes int64, count int) (float64, error) {
	buf, err := dev.Alloc(bytes, "bench copy")
	if err != nil {
		return 0, err
	}
	defer buf.Free()
	st := dev.NewStream()
	defer st.Close()
	if err := fillRange(dev, st, buf.Ptr(), bytes/8, kernels.F32, -0.5, 0.5); err != nil {
		return 0, err
	}
	a := &kernels.VecArgs{N: bytes / 8, Src: buf.Ptr(), Dst: buf.At(bytes / 2)}
	secs, err := timeOps(dev, st, count, 1, func() { st.Copy(a) })
	if err != nil {
		return 0, err
	}
	return float64(bytes) / median(secs), nil
}

// timeOps runs f count times after two warm-ups and returns the seconds of each, by events of the device; reps are the launches of one f,
// over which the time is spread.
func timeOps(dev *kernels.Device, st *kernels.Stream, count, reps int, f func()) ([]float64, error) {
	from, err := dev.NewEvent()
	if err != nil {
		return nil, err
	}
	defer from.Free()
	to, err := dev.NewEvent()
	if err != nil {
		return nil, err
	}
	defer to.Free()
	var secs []float64
	for i := -2; i < count; i++ {
		st.Record(from)
		f()
		st.Record(to)
		if err := st.Sync(); err != nil {
			return nil, err
		}
		ms, err := to.Since(from)
		if err != nil {
			return nil, err
		}
		if i >= 0 {
			secs = append(secs, ms/1e3/float64(reps))
		}
	}
	return secs, nil
}

// gemmRate is the median GFLOP/s of C[m,n] = A[m,k] B[n,k]^T in float32.
func gemmRate(dev *kernels.Device, m, k, n int64, count int) (float64, error) {
	return gemmRateOf(dev, kernels.F32, m, k, n, count)
}

func gemmRateOf(dev *kernels.Device, dt kernels.DType, m, k, n int64, count int) (float64, error) {
	e := int64(dt.Size())
	buf, err := dev.Alloc(e*(m*k+n*k+m*n), "bench gemm")
	if err != nil {
		return 0, err
	}
	defer buf.Free()
	st := dev.NewStream()
	defer st.Close()
	if err := fillRange(dev, st, buf.Ptr(), m*k+n*k, dt, -0.5, 0.5); err != nil {
		return 0, err
	}
	a := kernels.GemmArgs{DType: dt, Flags: kernels.TransB, M: m, N: n, K: k, A: buf.Ptr(), LDA: k, B: buf.At(e * m * k), LDB: k, C: buf.At(e * (m*k + n*k)), LDC: n}
	if size := dev.Workspace(kernels.OpGemm, unsafe.Pointer(&a)); size > 0 {
		ws, err := dev.Alloc(size, "bench workspace")
		if err != nil {
			return 0, err
		}
		defer ws.Free()
		a.WS, a.WSBytes = ws.Ptr(), ws.Bytes()
	}
	flops := 2 * float64(m*k*n)
	reps := max(1, int(2e8/flops))
	secs, err := timeOps(dev, st, count, reps, func() {
		for range reps {
			st.Gemm(&a)
		}
	})
	if err != nil {
		return 0, err
	}
	return flops / median(secs) / 1e9, nil
}
