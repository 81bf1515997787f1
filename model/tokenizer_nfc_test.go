package model

import (
	"math/rand/v2"
	"testing"
	"unicode/utf8"
)

// TestNormalSpan composes whole texts and compares; text in which nothing is to be done must be what composing gives.
func TestNormalSpan(t *testing.T) {
	rng := rand.New(rand.NewPCG(13, 14))
	marks := []rune{0x301, 0x323, 0x345, 0x94d, 0x5b0, 0xe38, 0xe48, 0x64e, 0x651, 0x1abf, 0x1161, 0x11a8, 0x9be, 0x344}
	normal := 0
	for range 20000 {
		var b []byte
		for range 1 + rng.IntN(10) {
			switch rng.IntN(5) {
			case 0:
				b = append(b, byte(rng.IntN(256)))
			case 1:
				b = utf8.AppendRune(b, marks[rng.IntN(len(marks))])
			case 2:
				b = append(b, 'e')
			default:
				b = utf8.AppendRune(b, rune(rng.IntN([]int{0x100, 0x3000, 0x30000, 0x110000}[rng.IntN(4)])))
			}
		}
		s := string(b)
		var c composer
		want := string(c.appendNFC(nil, s))
		if got := nfc(s); got != want {
			t.Fatalf("%+q gave %+q, want %+q", s, got, want)
		}
		if normalSpan(s) == len(s) {
			normal++
		}
	}
	if normal < 2000 || normal > 18000 {
		t.Errorf("%d of 20000 texts are normal", normal)
	}
}
