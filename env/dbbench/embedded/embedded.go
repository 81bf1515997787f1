// Package embedded is DBBench without a database server: one go-mysql-server
// engine per episode in this process, reached over in-memory connections through
// the ordinary MySQL driver, the row format of AgentBench's files, and a
// generator of original tasks ("TinyDB") in that format.
//
// The engine shares the process, so this package is also its containment: host
// files are out of reach, process-wide variables cannot be set, functions that
// could allocate without bound are capped, and Close ends every connection and
// query. It must never know what an attempt, a policy or a grade is.
//
// Start with Start and Server.DB for the engine, Row for the format, Generate
// for tasks. What the engine does differently from MySQL is listed, and tested,
// in deviations_test.go.
package embedded

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/metrics"
	"strings"
	"sync"
	"time"

	sqle "github.com/dolthub/go-mysql-server"
	"github.com/dolthub/go-mysql-server/memory"
	"github.com/dolthub/go-mysql-server/server"
	gsql "github.com/dolthub/go-mysql-server/sql"
	"github.com/go-sql-driver/mysql"
	"github.com/sirupsen/logrus"
)

// Version is the engine's module version, for reports.
const Version = "go-mysql-server v0.20.0"

// SQLMode is the session mode of every connection: MySQL 8's default.
const SQLMode = "ONLY_FULL_GROUP_BY,STRICT_TRANS_TABLES,NO_ZERO_IN_DATE,NO_ZERO_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION"

// noFiles is the directory host-file statements are confined to; it cannot exist.
const noFiles = "/dev/null/hs-no-files"

// Options configure one engine.
type Options struct {
	Listen string // also accept MySQL clients on this address ("127.0.0.1:0"); empty: in memory only
}

// Server is one engine with its own databases, users and connections.
type Server struct {
	engine *sqle.Engine
	srv    *server.Server
	lis    *listener
	tcp    net.Listener
	done   sync.WaitGroup
	once   sync.Once
}

var starting sync.Mutex

// Start builds an empty engine and begins to accept connections. The caller
// closes it.
func Start(o Options) (*Server, error) {
	if err := contain(); err != nil {
		return nil, err
	}
	inner := memory.NewDBProvider()
	starting.Lock() // every new engine writes the library's status variables again
	engine := sqle.NewDefault(provider{inner})
	starting.Unlock()
	s := &Server{engine: engine, lis: newListener()}
	srv, err := server.NewServer(server.Config{Protocol: "tcp", Address: "memory", Listener: s.lis, DisableClientMultiStatements: true,
		MaxLoggedQueryLen: -1}, engine, gsql.NewContext, memory.NewSessionBuilder(inner), nil)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start embedded engine: %w", err), engine.Close())
	}
	s.srv = srv
	s.done.Go(func() { srv.Listener.Accept() })
	if o.Listen != "" {
		tcp, err := net.Listen("tcp", o.Listen)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("listen on %s: %w", o.Listen, err), s.Close())
		}
		s.tcp = tcp
		s.done.Go(s.acceptTCP)
	}
	return s, nil
}

// contain sets what is common to all engines of the process: no host files, no
// log output of the engine's own. It is idempotent.
func contain() error {
	logrus.SetOutput(io.Discard)
	logrus.SetLevel(logrus.PanicLevel)
	if err := gsql.SystemVariables.AssignValues(map[string]any{"secure_file_priv": noFiles, "local_infile": int8(0)}); err != nil {
		return fmt.Errorf("confine host files: %w", err)
	}
	return nil
}

func (s *Server) acceptTCP() {
	for {
		c, err := s.tcp.Accept()
		if err != nil {
			return
		}
		if !s.lis.offer(context.Background(), c) {
			c.Close()
			return
		}
	}
}

// Addr is the address given to Options.Listen as bound, or "".
func (s *Server) Addr() string {
	if s.tcp == nil {
		return ""
	}
	return s.tcp.Addr().String()
}

// DB is a connection pool on database name ("" for none). Every connection
// starts with the settings of Init. The caller closes it.
func (s *Server) DB(name string) (*sql.DB, error) {
	cfg := mysql.NewConfig()
	cfg.User, cfg.Net, cfg.Addr, cfg.DBName = "root", "memory", "memory", name
	cfg.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) { return s.lis.dial(ctx) }
	cfg.Logger = &mysql.NopLogger{}
	cfg.InterpolateParams = true
	c, err := mysql.NewConnector(cfg)
	if err != nil {
		return nil, fmt.Errorf("configure connection: %w", err)
	}
	return sql.OpenDB(Connector{c, Init("utf8mb4_0900_ai_ci")}), nil
}

// Close ends every query and connection and waits for them. It is idempotent.
func (s *Server) Close() error {
	var err error
	s.once.Do(func() {
		if s.tcp != nil {
			s.tcp.Close()
		}
		s.lis.Close()
		if err = s.engine.Close(); errors.Is(err, context.Canceled) { // kills running queries
			err = nil // how its background threads report that they stopped
		}
		s.lis.hangUp()
		s.done.Wait()
		idle := make(chan struct{})
		go func() { s.srv.SessionManager().WaitForClosedConnections(); close(idle) }()
		select {
		case <-idle:
		case <-time.After(10 * time.Second):
			err = errors.Join(err, errors.New("close embedded engine: a query ignored its kill for 10s"))
		}
	})
	return err
}

// Init is the list of statements that open every connection, embedded or real:
// names and collation, strict mode, MySQL 8's group_concat limit.
func Init(collation string) []string {
	names := "SET NAMES utf8mb4"
	if collation != "" {
		names += " COLLATE " + collation
	}
	return []string{names, "SET SESSION sql_mode='" + SQLMode + "', SESSION group_concat_max_len=1024"}
}

// Connector is a driver.Connector that runs statements on each new connection.
type Connector struct {
	driver.Connector
	Init []string
}

// Connect dials and prepares a connection.
func (c Connector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	ex, ok := conn.(driver.ExecerContext)
	if !ok {
		return nil, errors.Join(errors.New("prepare connection: driver cannot execute directly"), conn.Close())
	}
	for _, q := range c.Init {
		if _, err := ex.ExecContext(ctx, q, nil); err != nil {
			return nil, errors.Join(fmt.Errorf("prepare connection: %s: %w", q, err), conn.Close())
		}
	}
	return conn, nil
}

// HeapBytes is the size of the live and not yet swept Go heap: what the memory
// guard samples.
func HeapBytes() int64 {
	s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(s)
	return int64(s[0].Value.Uint64())
}

// Refuse returns the error MySQL gives an unprivileged user (1227) when query
// would set a variable of the whole process, and nil otherwise.
func Refuse(query string) error {
	if setsGlobal(Scan(query)) {
		return &mysql.MySQLError{Number: 1227, SQLState: [5]byte([]byte("42000")),
			Message: "Access denied; you need (at least one of) the SUPER or SYSTEM_VARIABLES_ADMIN privilege(s) for this operation"}
	}
	return nil
}

func setsGlobal(toks []Token) bool {
	sawSet, sawPrepare := false, false
	for i, t := range toks {
		switch {
		case t.Is("SET"):
			sawSet = true
		case t.Is("PREPARE"):
			sawPrepare = true
		case sawPrepare && t.Kind == String && setsGlobal(Scan(t.Text)):
			return true
		case sawPrepare && t.Kind == Variable:
			return true // the text is not known before it runs
		case !sawSet:
		case t.Kind == Variable && globalPrefix(t.Text):
			return true
		case t.Kind == Variable && t.Text == "@@" && i+1 < len(toks) && globalPrefix("@@"+toks[i+1].Text):
			return true
		case t.Is("GLOBAL"), t.Is("PERSIST"), t.Is("PERSIST_ONLY"):
			scope := toks[i-1].Is("SET") || toks[i-1].Text == ","
			if scope && i+1 < len(toks) && (toks[i+1].Kind == Word || toks[i+1].Kind == Quoted) {
				return true
			}
		}
	}
	return false
}

func globalPrefix(v string) bool {
	v = strings.ToLower(strings.NewReplacer("`", "", " ", "").Replace(v))
	return strings.HasPrefix(v, "@@global") || strings.HasPrefix(v, "@@persist")
}

// listener hands in-memory connections to the engine and can hang them all up.
type listener struct {
	ch   chan net.Conn
	stop chan struct{}
	once sync.Once

	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

func newListener() *listener {
	return &listener{ch: make(chan net.Conn), stop: make(chan struct{}), conns: map[net.Conn]struct{}{}}
}

func (l *listener) dial(ctx context.Context) (net.Conn, error) {
	client, srv := net.Pipe()
	if !l.offer(ctx, srv) {
		client.Close()
		srv.Close()
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		return nil, &net.OpError{Op: "dial", Net: "memory", Err: net.ErrClosed}
	}
	return client, nil
}

func (l *listener) offer(ctx context.Context, c net.Conn) bool {
	select {
	case <-l.stop:
		return false
	default:
	}
	l.mu.Lock()
	tc := &tracked{Conn: c, l: l}
	l.conns[tc] = struct{}{}
	l.mu.Unlock()
	select {
	case l.ch <- tc:
		return true
	case <-l.stop:
	case <-ctx.Done():
	}
	l.forget(tc)
	return false
}

func (l *listener) forget(c net.Conn) {
	l.mu.Lock()
	delete(l.conns, c)
	l.mu.Unlock()
}

func (l *listener) hangUp() {
	l.mu.Lock()
	all := make([]net.Conn, 0, len(l.conns))
	for c := range l.conns {
		all = append(all, c)
	}
	l.mu.Unlock()
	for _, c := range all {
		c.Close()
	}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.ch:
		return c, nil
	case <-l.stop:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.stop) })
	return nil
}

func (l *listener) Addr() net.Addr { return memAddr{} }

type tracked struct {
	net.Conn
	l *listener
}

func (t *tracked) Close() error {
	t.l.forget(t)
	return t.Conn.Close()
}

type memAddr struct{}

func (memAddr) Network() string { return "memory" }
func (memAddr) String() string  { return "memory" }
