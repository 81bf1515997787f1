package trainer

import (
	"context"
	"fmt"
	"testing"

	"harness-s/env/harness"
	"harness-s/kernels"
	"harness-s/model"
)

// BenchmarkSchedulerStep is the host's work for one decode step, scheduler and runner, on a device that computes nothing. A decode step of 256
// sequences of Qwen3.5-4B takes an H200 17 ms (gpu.md 3.3).
func BenchmarkSchedulerStep(b *testing.B) {
	dev, err := kernels.Open("null", kernels.Options{})
	if err != nil {
		b.Fatal(err)
	}
	m, err := model.NewRandom(model.TinyConfig(), dev, 1, model.LoadOptions{DType: kernels.BF16})
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	for _, n := range []int{16, 256} {
		b.Run(fmt.Sprintf("sessions=%d", n), func(b *testing.B) {
			length := b.N + 64
			r, err := model.NewRunner(m, model.RunnerOptions{MaxSeqs: n, MaxTokens: n * length, MaxContext: length, PageSize: 16, MaxRows: 1024})
			if err != nil {
				b.Fatal(err)
			}
			defer r.Close()
			b.ReportAllocs()
			err = withSched(b, SamplerOf(r, dev), SchedOptions{MaxContext: length}, func(s *Scheduler) {
				b.ResetTimer()
				err := each(context.Background(), n, func(ctx context.Context, i int) error {
					t := s.Open(KindAttempt, model.Sampling{Temperature: 1}, 1)
					defer t.Close()
					_, err := t.Generate(ctx, harness.Request{Append: []int32{1, 2, int32(i)}, MaxNew: b.N, Key: harness.RNGKey{Attempt: i}})
					return err
				})
				b.StopTimer()
				if err != nil {
					b.Fatal(err)
				}
			})
			if err != nil {
				b.Fatal(err)
			}
		})
	}
}
