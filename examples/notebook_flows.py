# %% [markdown]
# # A training job's packets, worked through
#
# ring.pcap.gz holds 18.2 s of data-parallel training on three hosts, beside web-search traffic towards the first of
# them: headers of 15,177 packets. Run the cells one by one (VS Code, Jupyter with jupytext), or the file at once:
#
#     python examples/notebook_flows.py

# %%
"""The notebook API on a small capture: conversations, rates, the traffic matrix, the job in it, and a fit."""

from pathlib import Path

import pandas as pd

from ringtap import CongestionModel, Traffic, read_captures
from ringtap.analysis.model.demand import demand
from ringtap.analysis.structure import read_structure

HERE = Path(globals().get("__file__", "examples/notebook_flows.py")).parent
pd.set_option("display.width", 160, "display.max_columns", 12)

# %% [markdown]
# ## What is in the capture
#
# `read_captures` goes over the file once. What follows comes out of the tables that it makes, without reading again.

# %%
traffic: Traffic = read_captures(HERE / "ring.pcap.gz")
print(f"{traffic.counts['packets']:,} packets over {traffic.duration_s:.1f} s, in bins of {traffic.bin_ns / 1e6:g} ms")

conversations = traffic.conversations()
largest = conversations.assign(payload=conversations["payload_ab"] + conversations["payload_ba"])
columns = ["protocol", "a", "a_port", "b", "b_port", "packets_ab", "packets_ba", "payload_ab", "payload_ba"]
print(largest.nlargest(5, "payload")[columns].to_string(index=False))

# %% [markdown]
# ## Who sends how much to whom
#
# Payload in MB. 10.77.0.0/24 are the training interfaces, 10.78.0.0/24 those of the cross traffic.

# %%
matrix = traffic.matrix("payload") / 1e6
print(matrix.round(2).to_string())

# %% [markdown]
# ## Rates
#
# `select` takes filters in tcpdump's language. Rates are of frame bytes unless asked otherwise.

# %%
training = traffic.select("net 10.77.0.0/24")
cross = traffic.select("src host 10.78.0.4")
for name, part in (("training", training), ("cross traffic", cross)):
    rates = part.rates(by="total", bin_s=0.1)
    print(f"{name}: {rates['rate_bps'].max() / 1e6:.1f} Mbit/s in its busiest 100 ms")

by_hosts = training.rates(by="hosts", what="payload", bin_s=0.1)
print(by_hosts.groupby(["source", "destination"])["rate_bps"].max().div(1e6).round(1).to_string())

# instantaneous injection rate of one flow, as a moving average of 30 bins (as the thesis's figure 3-10)
flows = training.flows().sort_values("payload", ascending=False)
number = flows.index.to_list()[0]
injected_bps = training.injection_rate([number], window=30)
source, destination = flows["source"].iloc[0], flows["destination"].iloc[0]
print(f"{source} > {destination}: {injected_bps.max() / 1e6:.1f} Mbit/s at most")

# %% [markdown]
# ## The job, from its packets alone
#
# Its iterations, the order of the ring, and the number of parameters. The host 10.77.0.1 has a second address, on which
# the cross traffic arrives; with both named, the three flows of the thesis's figures 3-10 and 3-11 are known.

# %%
found = read_structure(HERE / "ring.pcap.gz", hosts={"S0": ["10.77.0.1", "10.78.0.1"]})
period, volume = found.period, found.volume
print(f"{found.shape.name} of {' > '.join(found.shape.hosts)}")
print(f"{period.iterations} iterations, {period.mean_s * 1e3:.1f} ms on average: {period.verdict}")
print(f"{volume.worker_bytes / 1e3:.1f} kB a worker and iteration")
print(f"{volume.parameters_least:,} to {volume.parameters:,} parameters")
print(found.iterations[["iteration_s", "communication_s", "silence_s", "bytes"]].describe().round(4).to_string())
print(found.peaks.pivot_table(index="scale_s", columns="host", values="peak_to_mean").round(2).to_string())
print(found.flow_rates.to_string(index=False))

# %% [markdown]
# The model had 30,000 parameters; equation 3.1 asks for this much. What is more are gloo's own message headers.

# %%
asked = demand(parameters=30_000, workers=3)
print(f"{asked.worker_bytes / 1e3:.1f} kB by equation 3.1: {volume.worker_bytes / asked.worker_bytes - 1:+.1%}")

# %% [markdown]
# ## What cross traffic does to an iteration
#
# Points of a sweep (measured cross traffic, mean iteration time), and the thesis's model t = A exp(B / (C - BW)^n).

# %%
points = pd.read_csv(HERE / "points.csv")
fit = CongestionModel(capacity_gbps=25).fit(points["bandwidth_gbps"].tolist(), points["iteration_s"].tolist())
print(fit.report())
