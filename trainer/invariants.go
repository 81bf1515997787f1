package trainer

import (
	"errors"
	"fmt"
	"math"
)

// GroupCheck is one task's final group as CheckStep sees it.
type GroupCheck struct {
	Task       string
	Base       GroupKind // kind after phase A
	Kind       GroupKind // kind after rescue; equal to Base when none was made
	Live       bool      // it enters the update
	Members    []Member  // final members, void ones included
	Harnesses  []string  // harness id per member
	Advantages []float64 // per member; nil when not live
	Digests    []string  // initial-state digest per attempt of the task, base and rescue; "" = not opened
	Policy     []uint64  // policy version per attempt
}

// StepCheck is a whole step.
type StepCheck struct {
	Tasks      int // tasks asked for
	Original   string
	MinGroup   int
	MaxGroup   int    // attempts per group
	Mode       string // rescue.mode
	PoolDigest string // of this step
	RunDigest  string // in the run header
	Policy     uint64
	Groups     []GroupCheck
}

// CheckStep asserts the invariants of method.md 3.11 and reports every violation.
// A violation is a fault of this program, not of the run's data.
func CheckStep(s StepCheck) error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	count := map[GroupKind]int{}
	after := map[GroupKind]int{}
	for _, g := range s.Groups {
		count[g.Base]++
		if g.Base == AllFail {
			after[g.Kind]++
		} else if g.Kind != g.Base {
			bad("group %s went from %s to %s", g.Task, g.Base, g.Kind)
		}
		checkGroup(s, g, bad)
	}
	if n := count[Kept] + count[AllFail] + count[Incomplete]; n != s.Tasks || len(s.Groups) != s.Tasks {
		bad("kept %d + all_fail %d + incomplete %d is not the %d tasks of the step", count[Kept], count[AllFail], count[Incomplete], s.Tasks)
	}
	if s.Mode != "off" {
		if n := after[Rescued] + after[StillAllFail] + after[RescueIncomplete]; n != count[AllFail] {
			bad("rescued %d + still_all_fail %d + rescue_incomplete %d is not all_fail %d", after[Rescued], after[StillAllFail], after[RescueIncomplete], count[AllFail])
		}
	} else if after[AllFail] != count[AllFail] {
		bad("rescue is off, but %d of %d all-fail groups were replaced", count[AllFail]-after[AllFail], count[AllFail])
	}
	if s.PoolDigest != s.RunDigest {
		bad("pool digest %.12s, run header has %.12s", s.PoolDigest, s.RunDigest)
	}
	if len(errs) > 0 {
		return fmt.Errorf("check step: %w", errors.Join(errs...))
	}
	return nil
}

func checkGroup(s StepCheck, g GroupCheck, bad func(format string, args ...any)) {
	if len(g.Harnesses) != len(g.Members) || g.Advantages != nil && len(g.Advantages) != len(g.Members) {
		bad("group %s has %d members, %d harnesses, %d advantages", g.Task, len(g.Members), len(g.Harnesses), len(g.Advantages))
		return
	}
	valid, sum := 0, 0.0
	for i, m := range g.Members {
		if m.Valid {
			valid++
		}
		if g.Advantages != nil {
			sum += g.Advantages[i]
			if !m.Valid && g.Advantages[i] != 0 {
				bad("group %s member %d is void and has advantage %v", g.Task, i, g.Advantages[i])
			}
		}
	}
	if g.Live {
		if valid < s.MinGroup || valid > s.MaxGroup {
			bad("live group %s has %d valid members, want %d to %d", g.Task, valid, s.MinGroup, s.MaxGroup)
		}
		if !Contrast(g.Members) {
			bad("live group %s has no contrast", g.Task)
		}
		if !(math.Abs(sum) < 1e-6*float64(max(valid, 1))) {
			bad("advantages of group %s sum to %v", g.Task, sum)
		}
	}
	replaced := g.Kind == Rescued || g.Kind == StillAllFail || g.Kind == RescueIncomplete
	seen := map[string]bool{}
	for _, h := range g.Harnesses {
		switch {
		case replaced && s.Mode == "siblings" && h == s.Original:
			bad("rescue of %s ran the original harness", g.Task)
		case replaced && s.Mode == "siblings" && seen[h]:
			bad("rescue of %s ran harness %s twice", g.Task, h)
		case !(replaced && s.Mode == "siblings") && h != s.Original:
			bad("attempt at %s ran harness %s instead of the original", g.Task, h)
		}
		seen[h] = true
	}
	digest := ""
	for _, d := range g.Digests {
		if d != "" && digest != "" && d != digest {
			bad("attempts at %s started from different states %.12s and %.12s", g.Task, digest, d)
			break
		}
		if d != "" {
			digest = d
		}
	}
	for _, v := range g.Policy {
		if v != s.Policy {
			bad("attempt at %s was sampled by policy version %d in a step of version %d", g.Task, v, s.Policy)
			break
		}
	}
}
