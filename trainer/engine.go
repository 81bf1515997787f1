package trainer

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"time"

	"harness-s/model"
)

// withEngine runs f with a scheduler and a watchdog at work. The first failure of
// the engine cancels f and is what it returns (pitfalls.md row 21).
func withEngine(ctx context.Context, cfg Config, d *Deps, f func(context.Context, *rollouts) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := NewScheduler(d.Sampler, SchedOptions{Stop: d.Stop, MaxContext: cfg.Model.MaxLen})
	r := newRollouts(cfg, d, s)
	var sched, watch sync.WaitGroup
	sched.Go(func() {
		runtime.LockOSThread() // one thread owns the device
		defer runtime.UnlockOSThread()
		if err := s.Run(ctx); err != nil {
			cancel(err)
		}
	})
	watch.Go(func() {
		if err := r.watch.run(ctx); err != nil {
			cancel(err)
		}
	})
	err := f(ctx, r)
	var broken *EngineError
	if cause := context.Cause(ctx); errors.As(cause, &broken) {
		err = cause
	}
	cancel(nil)
	watch.Wait()
	if errors.As(err, &broken) { // a hung engine is not waited for
		wait := make(chan struct{})
		go func() { sched.Wait(); close(wait) }()
		t := time.NewTimer(graceAfterDeadline)
		defer t.Stop()
		select {
		case <-wait:
		case <-t.C:
		}
		return err
	}
	sched.Wait()
	return err
}

// evalSampling is the sampling of evaluation: temperature 0 is argmax.
func evalSampling(temperature float64) model.Sampling {
	return model.Sampling{Temperature: float32(temperature), TopP: 1}
}
