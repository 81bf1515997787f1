package trainer

import "fmt"

// PassAt is the unbiased estimate of Pass@k for a task with n valid attempts and
// c successes (method.md 7.1). k must be in 1..n, c in 0..n.
func PassAt(n, c, k int) (float64, error) {
	if k < 1 || k > n || c < 0 || c > n {
		return 0, fmt.Errorf("estimate pass@k: k = %d, n = %d, c = %d", k, n, c)
	}
	if n-c < k {
		return 1, nil
	}
	miss := 1.0
	for i := n - c + 1; i <= n; i++ {
		miss *= 1 - float64(k)/float64(i)
	}
	return 1 - miss, nil
}

// TaskResult is the outcome of one task of an evaluation.
type TaskResult struct {
	Task     string `json:"task"`
	Group    string `json:"group"`          // cluster of the bootstrap: scenario, repository, family
	Asked    int    `json:"asked"`          // attempts wanted
	Valid    int    `json:"valid"`          // attempts with a verdict; less than Asked = missing after retries
	Success  int    `json:"success"`        // successes among them
	Mode     string `json:"mode,omitempty"` // original or routed
	Harness  string `json:"harness,omitempty"`
	Attempts []bool `json:"attempts,omitempty"` // verdicts of the valid attempts in order
}

// Pass is the task's Pass@k with missing attempts counted as failures, which is
// the strict score of method.md 7.2.
func (t TaskResult) Pass(k int) float64 {
	p, err := PassAt(t.Asked, t.Success, k)
	if err != nil {
		return 0
	}
	return p
}

// Complete reports whether every attempt has a verdict.
func (t TaskResult) Complete() bool { return t.Valid >= t.Asked }

// Score summarises tasks at one k.
type Score struct {
	K        int      `json:"k"`
	Tasks    int      `json:"tasks"`
	Strict   Interval `json:"strict"`   // missing attempts count as failures
	Missing  int      `json:"missing"`  // attempts without verdict
	Complete Interval `json:"complete"` // over tasks without missing attempts
	Kept     int      `json:"complete_tasks"`
}

// ScoreTasks returns the mean Pass@k with a bootstrap interval clustered by group.
// It refuses k above the number of attempts asked for.
func ScoreTasks(ts []TaskResult, k, resamples int, seed uint64) (Score, error) {
	s := Score{K: k, Tasks: len(ts)}
	strict, full := make([]Sample, 0, len(ts)), make([]Sample, 0, len(ts))
	for _, t := range ts {
		p, err := PassAt(t.Asked, t.Success, k)
		if err != nil {
			return s, fmt.Errorf("score task %s: %w", t.Task, err)
		}
		strict = append(strict, Sample{t.Group, p})
		s.Missing += t.Asked - t.Valid
		if t.Complete() {
			full = append(full, Sample{t.Group, p})
		}
	}
	s.Kept = len(full)
	s.Strict = Bootstrap(strict, resamples, seed)
	s.Complete = Bootstrap(full, resamples, seed)
	return s, nil
}
