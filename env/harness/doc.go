// Package harness is everything around the policy that shapes an attempt, as
// data: prompt sections, tool documentation, reminders, observation format,
// memory, budgets and guards. A Spec is one immutable harness, a Pool the
// frozen list of the original and its siblings, and an Episode joins one Spec
// with one env.Attempt.
//
// An Episode is a pull-based state machine (envs.md 1.3): it asks for tokens
// and never calls a model. It must never know weights, devices, rewards in the
// making or test gold, and it never re-tokenises what the policy sampled.
// Every token it holds carries its producer, so "did harness text enter the
// loss" is a query over the ledger.
//
// Start at Spec (spec.go), Episode (episode.go) and the rules between them
// (rules.go).
package harness
