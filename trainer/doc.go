// Package trainer is the algorithm of Harness-S: it collects attempts under the
// original harness, gives groups that failed as a whole a second chance under
// sibling harnesses, and updates the policy on what remains (method.md 3).
//
// One Scheduler turns every request for tokens into batches of one runner; one
// goroutine owns that runner. Each attempt is a goroutine of its own that joins
// an environment, a harness and the scheduler. All randomness is keyed by what
// is sampled, never by when, so the order of completion cannot change a result.
//
// The package must never know an environment by name, a file format of a model
// or a device: models come in through Sampler, Learner and Policy, tasks through
// env.Env. It must never read test tasks except through Evaluate.
//
// Start at Run (trainer.go), which reads top to bottom as one training step,
// then Scheduler (sched.go) and the group rules (rescue.go).
package trainer
