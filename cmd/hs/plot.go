package main

import (
	"fmt"
	"html/template"
	"math"
	"strings"
)

// series is one line of a plot: values by step, with an interval around each when Low and High are set.
type series struct {
	Name, Last string
	Class      string // s0 to s5, a colour of the style sheet
	X, Y       []float64
	Low, High  []float64
}

// plot is one figure of the report.
type plot struct {
	Caption string
	Series  []series
	Stacked bool // series are counts that add up, drawn as areas
	SVG     template.HTML
}

// numClasses is how many colours the style sheet has.
const numClasses = 6

const (
	plotW, plotH       = 520, 220
	padL, padR         = 52, 16
	padT, padB         = 10, 26
	innerW, innerH     = plotW - padL - padR, plotH - padT - padB
	maxTicks       int = 5
	svgHead            = `<svg viewBox="0 0 %d %d" role="img" aria-label="%s">`
)

// draw renders p as inline SVG, readable without scripts and on paper.
func (p *plot) draw() {
	for i := range p.Series {
		s := &p.Series[i]
		s.Class = fmt.Sprintf("s%d", i%numClasses)
		if n := len(s.Y); n > 0 {
			s.Last = short(s.Y[n-1])
		}
	}
	lines := p.Series
	if p.Stacked {
		lines = stack(p.Series)
	}
	x0, x1, y0, y1 := extent(lines, p.Stacked)
	px := func(x float64) float64 { return padL + (x-x0)/(x1-x0)*innerW }
	py := func(y float64) float64 { return padT + innerH - (y-y0)/(y1-y0)*innerH }
	var b strings.Builder
	fmt.Fprintf(&b, svgHead, plotW, plotH, template.HTMLEscapeString(p.Caption))
	for _, t := range ticks(y0, y1) {
		fmt.Fprintf(&b, `<line class="grid" x1="%d" x2="%d" y1="%.1f" y2="%.1f"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`, padL, plotW-padR, py(t), py(t), padL-6, py(t)+4, short(t))
	}
	for _, t := range ticks(x0, x1) {
		if t == math.Trunc(t) {
			fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%s</text>`, px(t), plotH-8, short(t))
		}
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">step</text>`, padL-12, plotH-8)
	for i := len(lines) - 1; i >= 0; i-- {
		s := lines[i]
		fmt.Fprintf(&b, `<g class="%s">`, s.Class)
		if p.Stacked && len(s.X) == 1 { // an area needs a width
			s.X, s.Y = []float64{s.X[0] - 0.25, s.X[0] + 0.25}, []float64{s.Y[0], s.Y[0]}
		}
		var pts strings.Builder
		for j := range s.X {
			fmt.Fprintf(&pts, "%.1f,%.1f ", px(s.X[j]), py(s.Y[j]))
		}
		if p.Stacked && len(s.X) > 0 {
			fmt.Fprintf(&b, `<polygon points="%.1f,%.1f %s%.1f,%.1f"/></g>`, px(s.X[0]), py(y0), pts.String(), px(s.X[len(s.X)-1]), py(y0))
			continue
		}
		for j := range s.Low {
			x := px(s.X[j]) + 4*float64(i) // side by side where steps are equal
			fmt.Fprintf(&b, `<line class="interval" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/>`, x, x, py(s.Low[j]), py(s.High[j]))
		}
		fmt.Fprintf(&b, `<polyline points="%s"/>`, pts.String())
		if len(s.X) <= 60 {
			for j := range s.X {
				fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="2.2"/>`, px(s.X[j]), py(s.Y[j]))
			}
		}
		b.WriteString("</g>")
	}
	b.WriteString("</svg>")
	p.SVG = template.HTML(b.String())
}

// stack turns series into running sums; they must share their steps.
func stack(in []series) []series {
	out := make([]series, len(in))
	for i, s := range in {
		out[i] = s
		out[i].Y = append([]float64(nil), s.Y...)
		if i > 0 {
			for j := range out[i].Y {
				if j < len(out[i-1].Y) {
					out[i].Y[j] += out[i-1].Y[j]
				}
			}
		}
	}
	return out
}

func extent(ss []series, zero bool) (x0, x1, y0, y1 float64) {
	x0, x1, y0, y1 = math.Inf(1), math.Inf(-1), math.Inf(1), math.Inf(-1)
	for _, s := range ss {
		for i := range s.X {
			x0, x1 = min(x0, s.X[i]), max(x1, s.X[i])
			y0, y1 = min(y0, s.Y[i]), max(y1, s.Y[i])
		}
		for i := range s.Low {
			y0, y1 = min(y0, s.Low[i]), max(y1, s.High[i])
		}
	}
	if x0 > x1 {
		return 0, 1, 0, 1
	}
	if zero || y0 > 0 && y0 < 0.5*y1 {
		y0 = 0
	}
	if x0 == x1 {
		x0, x1 = x0-0.5, x1+0.5
	}
	switch {
	case y0 == 0 && y1 == 0:
		y1 = 1
	case y0 == y1:
		d := 0.5 * math.Abs(y0)
		y0, y1 = y0-d, y1+d
	}
	return x0, x1, y0, y1 + 0.04*(y1-y0)
}

// ticks are at most maxTicks+1 round numbers in [a, b].
func ticks(a, b float64) []float64 {
	raw := (b - a) / float64(maxTicks)
	mag := math.Pow(10, math.Floor(math.Log10(raw)))
	step := mag
	for _, m := range []float64{1, 2, 5, 10} {
		if step = m * mag; step >= raw {
			break
		}
	}
	var out []float64
	for t := math.Ceil(a/step) * step; t <= b+1e-9*step; t += step {
		out = append(out, math.Round(t/step)*step)
	}
	return out
}

func short(v float64) string {
	switch a := math.Abs(v); {
	case v == 0:
		return "0"
	case a >= 1e6:
		return fmt.Sprintf("%.3gM", v/1e6)
	case a >= 1e4:
		return fmt.Sprintf("%.3gk", v/1e3)
	case a < 1e-3:
		return fmt.Sprintf("%.2g", v)
	}
	return fmt.Sprintf("%.4g", v)
}
