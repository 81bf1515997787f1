package main

import (
	"context"
	"errors"
	"log/slog"

	"github.com/lmittmann/tint"
)

// logger writes to stderr: warnings, and everything with -v.
func (g *globals) logger() *slog.Logger {
	level := slog.LevelWarn
	if g.Verbose {
		level = slog.LevelDebug
	}
	return slog.New(tint.NewTextHandler(g.errOut, &tint.Options{Level: level, NoColor: !g.colored(g.errOut)}))
}

// fanout sends a record to several handlers.
type fanout []slog.Handler

// Enabled reports whether any handler wants the level.
func (f fanout) Enabled(ctx context.Context, l slog.Level) bool {
	for _, h := range f {
		if h.Enabled(ctx, l) {
			return true
		}
	}
	return false
}

// Handle passes the record on.
func (f fanout) Handle(ctx context.Context, r slog.Record) error {
	var errs []error
	for _, h := range f {
		if h.Enabled(ctx, r.Level) {
			errs = append(errs, h.Handle(ctx, r.Clone()))
		}
	}
	return errors.Join(errs...)
}

// WithAttrs and WithGroup apply to every handler.
func (f fanout) WithAttrs(as []slog.Attr) slog.Handler {
	out := make(fanout, len(f))
	for i, h := range f {
		out[i] = h.WithAttrs(as)
	}
	return out
}

// WithGroup applies to every handler.
func (f fanout) WithGroup(name string) slog.Handler {
	out := make(fanout, len(f))
	for i, h := range f {
		out[i] = h.WithGroup(name)
	}
	return out
}
