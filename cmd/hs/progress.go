package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"harness-s/trainer"
)

// progress reports long phases on stderr: on a terminal one line that is redrawn, elsewhere at most one line in ten seconds, so that a
// log stays readable.
type progress struct {
	mu    sync.Mutex
	w     io.Writer
	off   bool
	tty   bool
	width int
	phase string
	start time.Time
	last  time.Time
	drawn bool
}

func newProgress(w io.Writer, off bool) *progress {
	p := &progress{w: w, off: off, tty: isTerminal(w), width: 100, last: time.Now()}
	if f, ok := w.(*os.File); ok && p.tty {
		if n, _, err := term.GetSize(int(f.Fd())); err == nil && n > 20 {
			p.width = n
		}
	}
	return p
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// report shows one progress report.
func (p *progress) report(r trainer.Progress) {
	if p == nil || p.off {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	fresh := r.Phase != p.phase
	if fresh {
		p.phase, p.start = r.Phase, now
	}
	if p.tty {
		if !fresh && r.Done != r.Total && now.Sub(p.last) < 100*time.Millisecond {
			return
		}
	} else if now.Sub(p.last) < 10*time.Second {
		return
	}
	p.last = now
	line := r.Phase
	if r.Total > 0 {
		line += fmt.Sprintf(" %d/%d", r.Done, r.Total)
		if el := now.Sub(p.start).Seconds(); r.Done > 0 && r.Done < r.Total && el > 1 {
			line += fmt.Sprintf(", %.0fs left", el/float64(r.Done)*float64(r.Total-r.Done))
		}
	} else if r.Done > 0 {
		line += fmt.Sprintf(" %d", r.Done)
	}
	if r.Note != "" {
		line += " " + r.Note
	}
	if p.tty {
		if n := p.width - 1; len(line) > n {
			line = line[:n]
		}
		fmt.Fprintf(p.w, "\r\x1b[K%s", line)
		p.drawn = true
		return
	}
	fmt.Fprintln(p.w, line)
}

// clear removes the drawn line before other output.
func (p *progress) clear() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.drawn {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.drawn = false
	}
}

func (p *progress) done() { p.clear() }

// bar draws a share as text, for tables.
func bar(share float64, width int) string {
	n := int(share*float64(width) + 0.5)
	n = max(0, min(width, n))
	return strings.Repeat("#", n) + strings.Repeat(".", width-n)
}
