package model

import "errors"

// Sentinels that callers branch on.
var (
	ErrNoTokenizer = errors.New("no tokenizer.json")
	ErrNoTiny      = errors.New("the embedded tiny checkpoint is not in this build")
	ErrNonFinite   = errors.New("non-finite value")
	ErrTruncated   = errors.New("file is truncated")
)

// Error is a failure that the user can fix: what was done, what went wrong, and what to do about it.
type Error struct {
	Op   string
	Err  error
	Hint string
}

// Error returns "op: err"; the hint is printed by the command line on its own line.
func (e *Error) Error() string { return e.Op + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }
