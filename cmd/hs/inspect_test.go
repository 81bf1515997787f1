package main

import (
	"bytes"
	"strings"
	"testing"
)

// TestShowKeepsNumbers checks that a filter does not renumber what it leaves: the numbers are what people type next.
func TestShowKeepsNumbers(t *testing.T) {
	var out bytes.Buffer
	g := &globals{out: &out}
	groups := []groupView{{Index: 0, Task: "a", Kind: "kept", Question: "Tables: x\nQuestion: which?"}, {Index: 1, Task: "b", Kind: "rescued", Question: "Tables: x\nQuestion: who?"}}
	if err := (&showCmd{Rescued: true}).step(g, 1, groups); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Split(out.String(), "\n"); len(lines) != 3 || !strings.HasPrefix(lines[1], "1  ") || !strings.Contains(lines[1], "who?") || strings.Contains(lines[1], "Tables") {
		t.Errorf("step table:\n%s", out.String())
	}
	out.Reset()
	q := groupView{Task: "b", Attempts: []attemptView{{Index: 0, Harness: "original"}, {Index: 1, Harness: "other", Success: true, InUpdate: true, Advantage: 1.5}}}
	if err := (&showCmd{Best: true}).group(g, q); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Split(out.String(), "\n"); len(lines) != 3 || !strings.HasPrefix(lines[1], "1  ") || !strings.Contains(lines[1], "+1.50") {
		t.Errorf("attempt table:\n%s", out.String())
	}
}
