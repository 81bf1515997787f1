package dbbench

import (
	"testing"

	"harness-s/env"
)

// BenchmarkEpisode is a whole gold episode: engine, load, statements, grade, close.
func BenchmarkEpisode(b *testing.B) {
	e, err := New(Options{Train: 64})
	if err != nil {
		b.Fatal(err)
	}
	i := 0
	for b.Loop() {
		tk := e.tasks[env.Train][i%64]
		i++
		if why, err := e.replay(b.Context(), tk); err != nil || why != "" {
			b.Fatal(why, err)
		}
	}
}
