package trainer

import (
	"errors"
	"fmt"
)

// Error is a failure the user can do something about: what was attempted, why it
// failed, and what to type or change.
type Error struct {
	Op   string // verb noun, lower case
	Err  error
	Hint string // may be empty
}

// Error renders "op: cause"; the hint is printed by the command line.
func (e *Error) Error() string { return e.Op + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Hint returns the hint of the first *Error in err's chain that has one.
func Hint(err error) string {
	for err != nil {
		var e *Error
		if !errors.As(err, &e) {
			return ""
		}
		if e.Hint != "" {
			return e.Hint
		}
		err = e.Err
	}
	return ""
}

// Sentinels for what callers branch on.
var (
	ErrConfig       = errors.New("invalid configuration")   // exit code 2
	ErrRunExists    = errors.New("run directory is in use") // exit code 2
	ErrLocked       = errors.New("run is locked by a live process")
	ErrNoCheckpoint = errors.New("no valid checkpoint")
	ErrDamaged      = errors.New("checkpoints are damaged")
	ErrNoSpace      = errors.New("not enough free space")
	ErrGate         = errors.New("gate tripped") // exit code 4
)

func hinted(op, hint, format string, args ...any) error {
	return &Error{Op: op, Err: fmt.Errorf(format, args...), Hint: hint}
}
