"""Every event that the daemon logs: its meaning and its fields. docs/logs.md is written from this.

A log line's ``event`` is one of these names; a test holds every call that logs against them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """``fields``: what a line carries beside time, level and event; "..." stands for more that the meaning names."""

    level: str
    meaning: str
    fields: tuple[str, ...] = ()


VOCABULARY: dict[str, Event] = {
    # start and end
    "config": Event("info", "The effective configuration, one field a setting.", ("...",)),
    "ready": Event(
        "info",
        "The daemon serves. `port`, `metrics_port`, `web_port`: 0 where there is none.",
        ("socket", "port", "metrics_port", "web_port", "backend", "devices", "epoch", "pid", "seconds"),
    ),
    "draining": Event("info", "The daemon opens nothing new; `live_leases` leases are still live.", ("live_leases",)),
    "start_refused": Event("error", "The daemon could not start, and why: a taken socket or port, say.", ("reason",)),
    "stopped": Event("info", "The daemon has ended in order."),
    # devices and memory
    "no_gpu": Event("info", "Backend auto found no GPU and takes shared memory.", ("reason",)),
    "device_ready": Event(
        "info",
        "A GPU with its link's measured figures, by the names of DeviceStatus.",
        ("device", "device_name", "pci", "free_bytes", "pool_bytes", "context_bytes", "..."),
    ),
    "gpu_broken": Event(
        "error",
        "A GPU answers no call any more: its transfers fail from now on. Restart the daemon.",
        ("device", "reason"),
    ),
    "device_lost": Event(
        "warning", "A GPU is broken: nothing new is registered there, readiness is off.", ("device", "reason", "...")
    ),
    "device_back": Event("info", "A device that was broken works again, with a new mover.", ("device",)),
    "device_memory_by_handles": Event(
        "warning",
        "The driver of these GPUs has no VMM memory: pools are mapped by IPC handles, and engines on them do not come "
        "back by themselves after a restart of the daemon.",
        ("devices",),
    ),
    "device_memory_lost": Event(
        "warning",
        "The slabs of a device were lost with its mover: `leases` leases are lost, and its replicas' contents.",
        ("device", "reason", "leases"),
    ),
    "memory_kept": Event(
        "error",
        "A model's memory is not given to another one: copies to it hang, and may go on. Restart the daemon.",
        ("model",),
    ),
    "device_loss_broke": Event(
        "error", "A defect: the ledger still counts on memory that is gone.", ("device", "traceback")
    ),
    "mover_died": Event(
        "error", "A device's mover has ended: `jobs` of its jobs fail.", ("device", "pid", "reason", "jobs")
    ),
    "mover_started": Event("warning", "A device has a mover again.", ("device", "pid", "lives")),
    "mover_not_started": Event(
        "warning",
        "A mover could not be started again yet, why, and when the next attempt comes.",
        ("device", "again_s", "reason"),
    ),
    "mover_not_closed": Event("warning", "A mover did not end in order.", ("device", "reason")),
    "mover_not_probed": Event("warning", "A mover did not say how its device is.", ("device", "reason")),
    "mover_slab_gone": Event("info", "A slab was to be freed, and had gone with its mover.", ("device", "reason")),
    "mover_sheet_gone": Event("info", "Words were to be closed, and had gone with their mover.", ("device", "reason")),
    "mover_chunk_not_told": Event("info", "A mover died before it had mapped a chunk of host memory.", ("reason",)),
    "mover_peer_not_told": Event("info", "A mover was not told of another one's slab, and why.", ("reason",)),
    "mover_loss_not_told": Event("error", "A defect: lost memory has no listener.", ("device", "reason")),
    "mover_record_broke": Event("error", "A defect: a record between daemon and mover broke.", ("kind", "traceback")),
    "mover_answer_broke": Event("error", "A defect: a mover's answer broke.", ("question", "traceback")),
    "mover_serves": Event("info", "A mover that was started by hand serves a daemon.", ("pid",)),
    "serving": Event("info", "What health checks answer from now on.", ("ready", "live")),
    "copies_are_made_to_fail": Event("warning", "The flag for tests is on: this share of copies fails.", ("share",)),
    "host_pool_whole": Event("info", "All of the host pool is there.", ("bytes", "seconds")),
    "host_pool_node": Event("info", "A NUMA node that gets its part of the host pool.", ("node", "gpus")),
    "numa_node_unreadable": Event("warning", "A NUMA node of the system could not be read.", ("node", "error")),
    "numa_not_applied": Event("info", "Memory was not bound to its NUMA node, and why.", ("node", "reason", "detail")),
    "numa_library_missing": Event(
        "info", "libnuma is not installed: memory lies where it falls.", ("library", "error")
    ),
    "host_pool_filling_failed": Event(
        "error", "The host pool stays smaller than configured, and why.", ("ready_chunks", "chunks", "reason")
    ),
    "host_pages_callback_failed": Event(
        "error", "Host pages came and could not be given out.", ("first_page", "pages")
    ),
    # storage shared by nodes
    "storage_connected": Event("info", "The store's master was found.", ("storage", "master")),
    "storage_unreachable": Event("info", "The store's master is not there; it is asked again.", ("storage", "reason")),
    "storage_memory_refused": Event(
        "warning",
        "The store's client refused memory of the host pool: nothing comes to it or goes from it.",
        ("storage", "size_bytes", "code"),
    ),
    "storage_batch_broke": Event("error", "A defect: a batch of reads or writes has failed."),
    "storage_connect_broke": Event("error", "A defect: no client of the store could be made; it is tried again."),
    "storage_question_broke": Event("error", "A defect: what was asked of the store has no answer."),
    # other nodes
    "peers_ready": Event("info", "Other nodes can borrow, at these ports.", ("port", "data_port")),
    "peer_failed": Event("info", "Another node did not answer, or wrongly; it rests for a while.", ("peer", "reason")),
    "peer_distrusted": Event(
        "warning",
        "The TLS handshake with another node fails for certificates, and why: nothing is borrowed of it. Logged every "
        "5 minutes.",
        ("peer", "reason"),
    ),
    "peer_object_wrong": Event("warning", "Another node sent something that is not what was asked for.", ("peer",)),
    "peer_refused": Event("info", "A peer without a token tried to borrow.", ("method",)),
    "peer_stream_refused": Event("info", "A connection for bytes had no valid secret."),
    "peer_stream_broke": Event("error", "A defect: a stream of bytes to another node has ended."),
    "peer_job_broke": Event("error", "A defect: something that was to be borrowed does not come."),
    "peer_beat_broke": Event("error", "A defect: a beat to other nodes was not sent."),
    # models, leases, processes
    "model_registered": Event(
        "info",
        "A model, or a further replica of one.",
        ("model", "model_name", "display_name", "devices", "device_pages", "host_pages"),
    ),
    "registration_broke": Event("error", "A defect: a model's pools were not made or not entered.", ("model_name",)),
    "lease_opened": Event("info", "An engine has a lease.", ("lease", "engine", "model", "replica")),
    "lease_joined": Event(
        "info", "A process shares the lease of its engine's others.", ("lease", "engine", "model", "replica")
    ),
    "lease_closed": Event("info", "An engine closed its lease.", ("lease", "quiesced")),
    "lease_silent": Event("warning", "A lease was silent for too long and is lost.", ("lease", "seconds")),
    "life_connection_refused": Event(
        "warning", "A process wanted a life connection that it may not have.", ("uid", "pid", "reason")
    ),
    "life_connection_dropped": Event(
        "info", "A life connection without lease and lane gave way to others of its user.", ("pid", "uid")
    ),
    "life_connection_broke": Event("info", "A life connection was ended: it broke, or is not read.", ("pid", "reason")),
    "life_not_accepting": Event(
        "warning", "No descriptor is left for life connections; tried again after the seconds.", ("reason", "seconds")
    ),
    "lane_opened": Event("info", "A process has a lane; `lanes`: of its life connection.", ("lanes",)),
    "lane_closed": Event("info", "A lane ended, after `calls` calls.", ("reason", "calls")),
    "lane_refused": Event(
        "warning", "A lane got bytes outside of its protocol, or no valid proof of its caller.", ("reason",)
    ),
    "lane_broke": Event("error", "A defect: a lane could not be served and was ended."),
    "tokens_read": Event("info", "Tokens, peers and quotas are those of the file.", ("entries", "tenants")),
    "token_retired": Event(
        "info",
        "An engine's token left the tokens' file: for so long it still serves the leases that its engine has.",
        ("caller", "tenant", "seconds"),
    ),
    "token_retired_shown": Event(
        "warning",
        "Callers still show a token that left the tokens' file, and lose their leases in so long: give them the new "
        "one. Logged once for each token.",
        ("caller", "tenant", "seconds"),
    ),
    "token_refused": Event(
        "warning",
        "Callers show a token that is revoked or has had its grace. They are refused, heartbeats too, so their leases "
        "are lost as silent. Logged once for each token.",
        ("caller", "tenant"),
    ),
    "tokens_not_read": Event(
        "warning",
        "The tokens' file cannot be used, or is gone; what was read before holds, for so long. Told every minute.",
        ("reason", "seconds"),
    ),
    "certificate_read": Event(
        "info", "A certificate is served, or shown to other nodes, from now on.", ("certificate",)
    ),
    "certificate_not_read": Event("warning", "The certificate cannot be used; the one before goes on.", ("reason",)),
    "reloaded": Event("info", "Settings changed while running, one field each.", ("...",)),
    "reload_refused": Event("warning", "The file asks for what cannot be, or not live; nothing changed.", ("reason",)),
    "reload_too_early": Event("info", "SIGHUP came before the daemon was up; its files are being read anyway."),
    "reload_by_signal_refused": Event("debug", "SIGHUP asked for that reload.", ("code",)),
    "process_ended": Event("info", "The kernel says that an engine's process is gone.", ("pid",)),
    "connection_ended": Event(
        "info", "A process counts as gone: its connection ended, and the grace is over.", ("pid",)
    ),
    # transfers and calls
    "transfer_failed": Event("warning", "A transfer failed, and why; its waiters get the error.", ("ticket", "reason")),
    "swap_done_callback_failed": Event("error", "A defect: the end of a transfer could not be told.", ("ticket",)),
    "copy_stream_broken": Event("error", "A defect: a copy stream takes no more jobs. Restart the daemon.", ("name",)),
    "copy_slice_failed": Event("error", "A defect: a slice's end on a broken stream.", ("name",)),
    "copy_waiters_not_released": Event("error", "A defect: waiters of a job were not released.", ("ticket",)),
    "checksums_not_taken": Event("error", "A defect: blocks have no checksums.", ("model", "blocks")),
    "page_not_read": Event(
        "info",
        "A page was not read for its checksum; those after it with the same reason are not logged.",
        ("model", "page", "reason"),
    ),
    "subscriber_cut_off": Event("warning", "A subscriber fell behind what is kept.", ("behind", "kept")),
    "subscriber_hung": Event("info", "A subscriber that was cut off did not take its status.", ("reason",)),
    "copy_done_callback_failed": Event("error", "A defect: the end of a copy could not be told.", ("ticket",)),
    "weights_announced": Event(
        "info",
        "An operator announced the version of weights that a model's engines load next.",
        ("model", "version", "previous"),
    ),
    "evicted_by_operator": Event("info", "An operator had blocks evicted.", ("model", "tier", "blocks")),
    "tokens_watch_broke": Event("error", "A defect: the tokens' file could not be looked at; it is tried again."),
    "sweep_broke": Event("error", "A defect: silent leases could not be looked for; it is tried again."),
    "device_look_broke": Event("error", "A defect: the devices could not be looked at; it is tried again."),
    "call_broke": Event(
        "error",
        "A defect: a call failed inside the daemon; the traceback says where. `model` 0: of none.",
        ("method", "model"),
    ),
    "chore_refused": Event(
        "warning", "What was left of a long flow cannot be had any more; nothing is lost by it.", ("model", "reason")
    ),
    "chore_broke": Event("error", "A defect: what was left of a long flow could not be carried through.", ("model",)),
    "landing_broke": Event("error", "A defect: the end of a transfer could not be carried through.", ("ticket",)),
    "model_distrusted": Event(
        "warning",
        "A defect was met in a call of the model: it is out of service until Verify finds it sound.",
        ("model", "reason"),
    ),
    "model_trusted": Event("info", "The model was found sound and is served again.", ("model",)),
    # storage
    "storage_ready": Event("info", "The storage tier; what is there is still being found.", ("storage",)),
    "storage_purged": Event(
        "info", "An operator had objects removed; an empty name: of all models.", ("model_name", "objects")
    ),
    "storage_not_direct": Event("info", "The filesystem refuses direct I/O: the page cache is used.", ("folder",)),
    "storage_read_failed": Event("info", "An object could not be read; it is computed instead.", ("reason",)),
    "storage_write_failed": Event("info", "An object could not be written.", ("reason",)),
    "storage_not_touched": Event("info", "The time of an object's last use could not be kept.", ("reason",)),
    "storage_label_not_kept": Event("warning", "A model's name could not be kept beside its objects.", ("reason",)),
    "storage_scan_broke": Event("error", "A defect: the folder could not be looked through; it is tried again."),
    "storage_job_broke": Event("error", "A defect: an object was not read or written, and its pages are held."),
    "storage_call_broke": Event("error", "A defect: what was asked of storage was not carried out."),
    "storage_news_broke": Event(
        "error", "A defect: what became of stored blocks could not be carried through.", ("model",)
    ),
    # telemetry itself
    "metrics_push_failed": Event("warning", "A reading was not taken or sent; the next one may be.", ("reason",)),
    "scrape_failed": Event("error", "A defect: the page of metrics could not be made; the scraper got none."),
    "log_lines_lost": Event("warning", "Lines that standard error did not take: it was full or closed.", ("lines",)),
    "library_log": Event("info", "A library's own words, at its level.", ("logger", "text")),
}
