"""What runs where on Ray: configuration, the Serve application, ranks, the control actor, start and stop.

    serried serve ── supervisor (launcher.py: ports, environment, signals, the last kill; never imports Ray)
        └─ driver (driver.py: Ray, control actor, Serve application, waits for ready, orderly shutdown)
             └─ Ray ─ control actor (control.py: ledger + membership behind one framed TCP endpoint)
                    ─ Serve ─ router replicas (router_replica.py) ─ HAProxy in front of them
                            ─ rank replicas (rank.py → rank_server.py → rank_loop.py), one deployment per pool

Ray and Serve own placement, health, restarts and the order of life; requests and tokens never pass through them.
A rank registers itself with the control actor and is a member as long as that connection lives; routers learn the
members there, count their requests there, and talk to each rank over a connection of their own.

`config` and `membership` are pure. The control actor and the routers run on their process's event loop; a rank has
an IO thread and a step thread. Every process carries the run's id in its environment, so that the supervisor can
find and end whatever outlives an orderly shutdown.
"""
